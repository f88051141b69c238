"""The first start of several ranks: a process of its own traces the model, and no rank imports PyTorch."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.errors import ConfigError
from quire.models.registry import ModelRegistry
from quire.parallel import plan_process
from tests.models.tiny_configs import LLAMA
from tests.runtime.plan.test_stored_plan import write_model

ROOT = Path(__file__).parents[2]
FIELDS = {**LLAMA, "hidden_size": 64, "intermediate_size": 96}
PROGRAM = """
import json, psutil, sys
from quire.engine.llm import LLM
from quire.sampling_params import SamplingParams

directory, options = sys.argv[1], json.loads(sys.argv[2])
with LLM(directory, max_model_len=64, dtype="float32", **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": [5, 3, 8]}], params, use_tqdm=False)
    me = psutil.Process()
    ranks = [item for item in me.children() if any("rank_child" in word for word in item.cmdline())]
    has_torch = ["libtorch" in open(f"/proc/{item.pid}/maps").read() for item in (me, *ranks)]
print(json.dumps({"tokens": list(answer.outputs[0].token_ids), "has_torch": has_torch}))
"""
SIZES = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "llama", FIELDS)


def start(model: Path, cache: Path, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    environment = {**os.environ, "QUIRE_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH')}"}
    del environment["QUIRE_PLAN_CACHE"]
    command = [sys.executable, "-c", PROGRAM, str(model), json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("options", SIZES)
def test_ranks_of_a_first_start_do_not_import_torch(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    first, _ = start(model, tmp_path / "cache", options)
    assert first["has_torch"] == [False, False]
    assert len(list((tmp_path / "cache" / "plans").glob("plan-*"))) == 2
    assert start(model, tmp_path / "cache", options)[0] == first


def test_cache_that_cannot_be_written_lets_each_rank_trace_with_a_note(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    found, stderr = start(model, tmp_path / "cache", SIZES[0])
    assert found["has_torch"] == [True, True]
    assert "the plans of 2 ranks cannot be kept in" in stderr
    assert found["tokens"] == start(model, tmp_path / "other", {})[0]["tokens"]


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of plans of engines in this process."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QUIRE_PLAN_CACHE")
    monkeypatch.setattr(ModelRegistry, "_registered", {})
    return tmp_path / "cache" / "plans"


def test_size_that_does_not_divide_is_refused_by_the_process_that_traces(model: Path, plans: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not divide 4 attention heads; the nearest that fits: .* 2 or 4$"):
        LLM(str(model), max_model_len=64, tensor_parallel_size=3)
    assert list(plans.glob("plan-*")) == []


def test_process_that_is_killed_leaves_tracing_to_the_ranks(
    model: Path, plans: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed = subprocess.CompletedProcess((), -9, b"")
    monkeypatch.setattr(plan_process.subprocess, "run", lambda *_, **__: killed)
    with caplog.at_level(logging.WARNING), LLM(str(model), max_model_len=64, tensor_parallel_size=2):
        assert len(list(plans.glob("plan-*"))) == 2  # which each rank has kept
    assert "ended with status -9" in caplog.text
