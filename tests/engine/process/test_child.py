"""The engine's process, real, with a tiny model."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import EngineOptions
from quire.engine.process.client import EngineClient
from quire.engine.process.messages import RequestUpdate, Submit
from quire.engine.process.stream import RequestStream
from quire.errors import EngineDeadError, ModelFileError
from quire.types import RequestSpec
from tests.cli.tiny_directory import make_tiny_directory
from tests.processes import wait_for_end

LIMIT_S = 60
PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"))


async def read(stream: RequestStream) -> list[RequestUpdate]:
    return [update async for update in stream]


def submission(prompt: list[int], params: SamplingParams) -> Submit:
    return Submit(RequestSpec("r", prompt, params, max_tokens=params.max_tokens or 1, seed=params.seed or 0))


async def tokens(client: EngineClient, params: SamplingParams = PARAMS) -> list[int]:
    updates = await read(client.submit(submission([5, 6, 7], params)))
    return [token_id for update in updates for choice in update.choices for token_id in choice.token_ids]


def test_it_computes_as_in_process_ignores_terminal_signals_and_its_death_is_told(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file where it is started stands for no module.
    (tmp_path / "queue.py").write_text("raise SystemExit('not the library')")
    monkeypatch.chdir(tmp_path)
    with LLM(str(directory)) as llm:
        expected = llm.generate([[5, 6, 7]], PARAMS, use_tqdm=False)[0].outputs[0].token_ids

    async def scenario() -> None:
        deaths: list[EngineDeadError] = []
        client = EngineClient(deaths.append)
        ready = await client.start(EngineOptions(model=str(directory)))
        assert ready.config.options.model == str(directory)
        assert ready.startup_times["total"] > 0
        assert client.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.pid, number)
        assert await tokens(client) == expected
        os.kill(client.pid, signal.SIGSTOP)  # else it might be done before it is killed
        running = client.submit(submission([5], SamplingParams(max_tokens=100, ignore_eos=True)))
        client.kill()
        with pytest.raises(EngineDeadError):
            await read(running)
        assert len(deaths) == 1
        await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_model_that_answers_nothing_is_not_ready(tmp_path: Path) -> None:
    directory = make_tiny_directory(tmp_path)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][:] = np.nan
    save_file(weights, directory / "model.safetensors")
    client = EngineClient()
    with pytest.raises(ModelFileError, match=f"{tmp_path} answers no request.*NaN"):
        asyncio.run(asyncio.wait_for(client.start(EngineOptions(model=str(directory))), LIMIT_S))


def test_what_loading_made_is_no_part_of_later_collections(directory: Path) -> None:
    code = (
        "import gc, sys\n"
        "from quire.config import EngineOptions\n"
        "from quire.engine.process.child import _build\n"
        "from quire.engine.process.messages import Start\n"
        "engine = _build(Start(EngineOptions(model=sys.argv[1])))\n"
        "print(gc.get_freeze_count() / (gc.get_freeze_count() + len(gc.get_objects())))\n"
        "engine.shutdown()\n"
    )
    command = [sys.executable, "-c", code, str(directory)]
    assert float(subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S).stdout) > 0.95


def test_killed_server_leaves_no_engine_behind(directory: Path) -> None:
    # The server is killed without a chance to say anything; its engine must not stay behind.
    code = (
        "import asyncio, os, sys\n"
        "from quire.config import EngineOptions\n"
        "from quire.engine.process.client import EngineClient\n"
        "async def main():\n"
        "    client = EngineClient()\n"
        "    await client.start(EngineOptions(model=sys.argv[1]))\n"
        "    print(client.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(directory)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    wait_for_end(int(killed.stdout))
