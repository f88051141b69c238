"""Failures and disconnects while `AsyncLLM` works: every caller gets an end, and other requests go on."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.engine.async_llm import AsyncLLM
from quire.errors import EngineDeadError
from quire.sampling_params import SamplingParams
from tests.cli.tiny_directory import make_tiny_directory
from tests.engine.async_builders import Gate, collect, played, wait_until
from tests.engine.builders import ScriptedExecutor, make_engine


@played()
async def test_call_that_nobody_awaits_any_more_disturbs_nobody(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    gate = Gate(executor, at_step=2)
    both = [asyncio.create_task(collect(llm, "p", SamplingParams(max_tokens=9), name)) for name in ("a", "b")]
    await gate.reached()
    calls = [asyncio.create_task(llm.abort("a")), asyncio.create_task(llm.reset_prefix_cache())]
    await wait_until(lambda: len(llm._driver._inbox) >= 2)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    gate.open()
    first, second = await asyncio.gather(*both)
    assert llm.is_running
    assert first[-1].outputs[0].finish_reason == "abort"
    assert second[-1].outputs[0].finish_reason == "length"


@played()
async def test_when_adding_breaks_the_engine_those_behind_are_told(
    llm: AsyncLLM, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("queue")

    gate = Gate(executor, at_step=1)
    tasks = [asyncio.create_task(collect(llm, "p"))]
    await gate.reached()
    monkeypatch.setattr(llm.llm_engine, "submit", fail)
    tasks += [asyncio.create_task(collect(llm, "p")) for _ in range(3)]
    await gate.open_after(llm, 3)
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, (EngineDeadError, ZeroDivisionError)) for error in errors)
    assert llm.errored


def test_nobody_waits_for_outputs_that_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault while outputs are made, after some requests have been crossed off."""
    engine, _ = make_engine()

    def lose(*_: object) -> None:
        for request_id in engine._output_processor.request_ids:
            engine._output_processor.discard(request_id)
        raise ZeroDivisionError("outputs")

    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(EngineDeadError, match="outputs"):
            [output async for output in llm.generate("hello", SamplingParams())]

    monkeypatch.setattr(engine._output_processor, "process", lose)
    with AsyncLLM.from_engine(engine) as llm:
        asyncio.run(asyncio.wait_for(scenario(llm), 60))


FORGETFUL = """
import asyncio, sys
from quire import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM(sys.argv[1], load_format="dummy", num_blocks_override=300)
    async for output in llm.generate("hello", SamplingParams(max_tokens=3000, ignore_eos=True)):
        break

asyncio.run(main())
print("end")
"""


def test_program_may_end_without_shutdown_while_requests_run(tmp_path: Path) -> None:
    directory = make_tiny_directory(tmp_path, max_position_embeddings=4096)
    command = [sys.executable, "-c", FORGETFUL, str(directory)]
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr
