"""Ranks in processes: the same tokens, and no process is left over, however one of them ends."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from benchmarks.server_process import children_of
from quire.engine.driver import EngineDriver
from quire.engine.llm import LLM
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, EngineDeadError, ModelFileError
from quire.parallel import rank_processes
from quire.parallel.rank_messages import Step
from quire.parallel.tensor_parallel import RankExecutor, create_executor
from quire.runtime import torch_group
from quire.runtime.shared_file import finish
from quire.runtime.torch_group import TorchGroup
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.structured_outputs import StructuredOutputsParams
from quire.types import ScheduledRequest, SchedulerOutput
from tests.models.tiny_configs import LLAMA, full_config
from tests.parallel.test_executor import generate, make_request, prompt
from tests.parallel.test_tensor_parallel import raise_for
from tests.processes import wait_for_end
from tests.runtime.plan.harness import make_config
from tests.runtime.test_tensor_parallel import random_checkpoint
from tests.runtime.tiny_llama import tiny_llama
from tests.runtime.tiny_model import run_to_end, tokens_of

LIMIT_S = 60.0


def rank_pids(parent: int | None = None) -> list[int]:
    """The processes of ranks that a process has started."""
    return [child.pid for child in children_of(parent, "rank_child")]


TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
OP_BY_OP = {**TENSOR, "enforce_eager": True}
all_ways = pytest.mark.parametrize("executor", [TENSOR, PIPELINE, OP_BY_OP], indirect=True)
waiting_for_values = pytest.mark.parametrize("executor", [PIPELINE, OP_BY_OP], indirect=True)


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> Iterator[RankExecutor]:
    """Two ranks of one stage, or `request.param`."""
    config, checkpoint = tiny_llama(block_size=16, **getattr(request, "param", TENSOR))
    made = create_executor(config, checkpoint)
    assert isinstance(made, RankExecutor)
    yield made
    made.shutdown()
    assert rank_pids() == []


def step_of(executor: RankExecutor, name: str = "r0") -> SchedulerOutput:
    """A first step, submitted."""
    config, _ = tiny_llama(block_size=16, tensor_parallel_size=2)
    scheduler = Scheduler(config.scheduler)
    scheduler.add_request(make_request(name, prompt(2)))
    output = scheduler.schedule()
    executor.submit(output)
    return output


@all_ways
def test_processes_give_the_tokens_of_one_worker_then_fail_with_a_killed_rank(executor: RankExecutor) -> None:
    assert executor._worker is not None
    settings = replace(executor._worker.config.scheduler, max_in_flight=executor.max_in_flight)
    raise_for(executor._worker.sampler.rows, "sample")
    for temperature in (0.0, 0.9):
        bad = make_request("bad", prompt(2), temperature=0.9)
        items = [make_request(f"r{i}", prompt(i), seed=i, temperature=temperature) for i in range(4)]
        found, _ = run_to_end(Scheduler(settings), executor, [bad, *items])
        assert "could not be sampled" in (found.pop("bad")[-1].error or "")
        items = [make_request(f"r{i}", prompt(i), seed=i, temperature=temperature) for i in range(4)]
        assert {name: tokens_of(results) for name, results in found.items()} == generate(*items, block_size=16)[0]
        forget = SchedulerOutput(99, (), (), (), (), (), forgets_all=True)
        executor.submit(forget)
        executor.collect()
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    for _ in range(2):
        step_of(executor)
        with pytest.raises(EngineDeadError, match=r"rank 1 of 2 was killed by SIGKILL \(9\) \(out of memory\?\)"):
            executor.collect()
    executor.shutdown()
    executor.shutdown()
    step_of(executor)
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.collect()


@waiting_for_values
def test_rank_killed_while_rank_0_waits_for_it_ends_the_step(executor: RankExecutor) -> None:
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGSTOP)
    raised: list[BaseException] = []

    def collect() -> None:
        try:
            executor.collect()
        except BaseException as error:
            raised.append(error)

    step_of(executor)
    waiting = threading.Thread(target=collect)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    os.kill(pid, signal.SIGKILL)
    waiting.join(LIMIT_S)
    assert "rank 1 of 2 was killed by SIGKILL" in str(raised[0])


def test_error_in_a_step_ends_all_ranks(executor: RankExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    assert executor._worker is not None
    monkeypatch.setattr(executor._worker.runner, "run", fail)
    (pid,) = rank_pids()
    step_of(executor)
    with pytest.raises(EngineDeadError, match="rank 0 failed with RuntimeError: no such luck"):
        executor.collect()
    wait_for_end(pid)


@waiting_for_values
def test_error_in_another_rank_ends_the_engine(executor: RankExecutor) -> None:
    item = ScheduledRequest("stranger", 0, 1, 1, (), ())
    executor._processes.send(Step(SchedulerOutput(0, (), (item,), (), (), ())))
    step_of(executor)
    with pytest.raises(EngineDeadError, match="request 'stranger' was scheduled, but"):
        executor.collect()


_ENGINE = """
import sys, time
from quire.parallel import rank_processes
from quire.parallel.rank_messages import Step
from quire.parallel.tensor_parallel import create_executor
from tests.runtime.tiny_llama import tiny_llama

executor = create_executor(*tiny_llama(block_size=16, tensor_parallel_size=2, pipeline_parallel_size=2))
print("ready", flush=True)
time.sleep(600)
"""


def test_ranks_end_with_a_killed_engine() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", _ENGINE], cwd=root, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        pids = rank_pids(engine.pid)
        assert len(pids) == 3
        engine.kill()
        engine.wait(LIMIT_S)
        wait_for_end(*pids)


# --- Loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [TENSOR, OP_BY_OP])
def test_error_in_a_rank_that_loads_is_raised_and_leaves_no_process(options: dict[str, Any]) -> None:
    """The rank reads the model's files, of which there are none."""
    hf_config = full_config("llama", LLAMA)
    config = make_config(hf_config, **options)
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read"):
        create_executor(config, random_checkpoint(hf_config))
    assert rank_pids() == []


def test_rank_that_ends_before_it_joins_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "StartRank", lambda *_: Step(SchedulerOutput(0, (), (), (), (), ())))
    with pytest.raises(EngineDeadError, match="rank 1 of 2 "):
        create_executor(*tiny_llama(**OP_BY_OP))
    assert rank_pids() == []
    for thread in threading.enumerate():
        if thread.name == "quire-join":
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "rank 0 still waits for the lost rank"


def test_rank_that_dies_before_it_connects_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has published its address, and never hears of rank 0's."""
    monkeypatch.setattr(torch_group, "CONNECT", timedelta(seconds=1))
    ours, theirs = HashStore(), HashStore()
    theirs.set("rank 0", "is there")
    lost: list[int] = []

    def join(store: HashStore, rank: int) -> None:
        with pytest.raises(EngineDeadError, match="a rank of the model is lost"):
            TorchGroup(store, rank, 2, torch.device("cpu"), 97)
        lost.append(rank)

    dying = threading.Thread(target=join, args=(theirs, 1))
    dying.start()
    theirs.wait(["gloo/0/1"], timedelta(seconds=LIMIT_S))
    for key in ("rank 1", "gloo/0/1"):
        ours.set(key, theirs.get(key))
    waiting = threading.Thread(target=join, args=(ours, 0))
    waiting.start()
    for thread in (waiting, dying):
        thread.join(LIMIT_S)
    assert sorted(lost) == [0, 1]


_STUBS = """
import os, signal, socket, sys, time
from quire.errors import EngineDeadError
from quire.parallel.frames import SentError, frame
from quire.parallel.rank_messages import RankFailed

connection = socket.socket(fileno=int(sys.argv[1]))
if RANK < 3 or not DIES:
    connection.sendall(frame(RankFailed(SentError.of(EngineDeadError("a rank of the model is lost")))))
else:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("dies", "message"), [(True, "rank 3 of 4 was killed by SIGKILL"), (False, "a rank of the")])
def test_rank_that_lost_another_one_is_not_named_for_it(
    dies: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks tell of the loss first. Where no rank's end explains it, it is the failure."""
    start, ranks = subprocess.Popen, iter((1, 2, 3))

    def start_stub(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        stub = _STUBS.replace("RANK", str(next(ranks))).replace("DIES", str(dies))
        return start([command[0], "-c", stub, *command[4:]], **settings)

    monkeypatch.setattr(subprocess, "Popen", start_stub)
    with pytest.raises(EngineDeadError, match=message):
        create_executor(*tiny_llama(block_size=16, **TENSOR, **PIPELINE))


def test_sizes_that_do_not_divide_name_the_nearest_and_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=r"divide 6 attention heads; the nearest that fits: .* 2$"):
        create_executor(*tiny_llama(block_size=16, tensor_parallel_size=4))


# --- The engine -----------------------------------------------------------------------------------


def test_idle_engine_dies_with_a_rank(executor: RankExecutor) -> None:
    """A server then replaces it before a request comes."""
    config, _ = tiny_llama(block_size=16, tensor_parallel_size=2)
    engine = LLMEngine(config, executor)
    driver = EngineDriver(engine, lambda outputs: None)
    running = threading.Thread(target=driver.run)
    running.start()
    (pid,) = rank_pids()
    os.kill(pid, signal.SIGKILL)
    running.join(LIMIT_S)
    assert not running.is_alive()
    with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed by SIGKILL"):
        engine.check_health()
    told: list[EngineDeadError] = []
    executor.watch(told.append)
    assert "SIGKILL" in told[0].message


@pytest.mark.model
def test_ranks_write_smollm2s_text_and_their_files_of_packed_weights(smollm2_path: Path, tmp_path: Path) -> None:
    """Nine query heads and three KV heads: three ranks fit and two do not. In bf16 the last bits may differ."""
    params = SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for sizes in ({}, {"tensor_parallel_size": 3}, PIPELINE):
        cache = tmp_path / str(len(texts))
        options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "weight_cache": str(cache)}
        with LLM(str(smollm2_path), **options, **sizes) as llm:
            results = llm.generate(["The capital of France is", "1, 2, 3, 5,"], params, use_tqdm=False)
            form = StructuredOutputsParams(regex="(red|green|blue), [0-9]{3}")
            shaped = SamplingParams(temperature=1, seed=3, max_tokens=16, structured_outputs=form)
            results += llm.generate(["A colour and a number:"], shaped, use_tqdm=False)
        finish()
        assert len(list(cache.glob("*.weights"))) == llm.llm_engine.config.num_ranks
        texts.append([result.outputs[0].text for result in results])
    assert texts[0] == texts[1] == texts[2]
    assert re.fullmatch("(red|green|blue), [0-9]{3}", texts[1][-1])
    with pytest.raises(ConfigError, match=r"divide 9 attention heads; the nearest that fits: .* 1 or 3$"):
        LLM(str(smollm2_path), tensor_parallel_size=2)
    assert rank_pids() == []
