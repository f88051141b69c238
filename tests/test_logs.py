"""The log of a script: its level, its lines by part of the engine, and the handlers of the program."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.logs import LEVEL_VARIABLE, follow_environment
from tests.cli.tiny_directory import make_tiny_directory

SCRIPT = """
from quire import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM({directory!r}, device="cpu", max_model_len=64, tensor_parallel_size={ranks})
    llm.generate("Hi", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
"""


def run_script(directory: Path, ranks: int, level: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(directory=str(directory), ranks=ranks)
    environment = {**os.environ, LEVEL_VARIABLE: level}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_script_logs_scheduler_executor_and_worker_of_each_rank_at_debug(tmp_path: Path) -> None:
    result = run_script(make_tiny_directory(tmp_path / "tiny"), 2, "debug")
    assert result.returncode == 0, result.stderr
    for line in (
        r"DEBUG quire\.scheduler: arrive \S+ num_prompt_tokens=2",
        r"DEBUG quire\.scheduler: schedule step_id=1 num_tokens=2",
        r"DEBUG quire\.parallel: step 1: 1 requests, 2 tokens, 1 new",
        r"DEBUG quire\.runtime: step 1: 2 rows, 1 requests, 1 sample",
        r"DEBUG quire\.runtime rank 1: step 1: 2 rows, 1 requests, 1 sample",
        r"DEBUG quire\.engine: step step_id=1 num_tokens=2",
        r"DEBUG quire\.scheduler: finish \S+ reason=length num_output_tokens=2",
    ):
        assert re.search(f"^{line}", result.stderr, re.MULTILINE), line


def test_script_with_a_wrong_level_ends_with_the_levels(tmp_path: Path) -> None:
    result = run_script(make_tiny_directory(tmp_path / "tiny"), 1, "loud")
    assert result.returncode != 0
    assert "QUIRE_LOGGING_LEVEL='LOUD' is not one of DEBUG, INFO" in result.stderr


def test_handlers_of_the_program_stay_the_only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("quire")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    follow_environment()
    assert (logger.handlers, logger.level) == ([], logging.NOTSET)
    monkeypatch.setenv(LEVEL_VARIABLE, "info")
    own = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [own])
    follow_environment()
    assert (logger.handlers, logger.level) == ([], logging.INFO)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    follow_environment()
    follow_environment()
    assert len(logger.handlers) == 1
    monkeypatch.setenv(LEVEL_VARIABLE, "all")
    with pytest.raises(ConfigError, match="'ALL' is not one of"):
        follow_environment()
