"""A command line to call, and an engine that answers without a model."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from quire.cli.command import LOGGERS
from quire.cli.main import cli
from quire.config import Decision, EngineOptions
from quire.engine.llm_engine import LLMEngine
from quire.logs import LEVEL_VARIABLE
from tests.engine.builders import ScriptedExecutor, byte_tokenizer, make_config, saying

ANSWER = "Because."
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def call(*arguments: str, stdin: str | None = None) -> Result:
    """Run one command line in this process. Click's runner has no terminal: `isatty` is false."""
    # The command line sets the variable for its child processes; servers of later tests must not log each request.
    environment = {LEVEL_VARIABLE: os.environ.get(LEVEL_VARIABLE)}
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    try:
        return CliRunner(env=environment).invoke(cli, list(arguments), input=stdin)
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers


def call_process(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run one command line as a user's shell does."""
    command = [sys.executable, "-m", "quire", *arguments]
    defaults: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, check=False, **{**defaults, **settings})


def parsed(result: Result) -> dict[str, Any]:
    """Return the JSON object on stdout; there must be exactly one."""
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], int]]:
    """Make standard input a terminal; yield what types on it."""
    pty = pytest.importorskip("pty")
    controller, side = pty.openpty()
    with open(side) as keys, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", keys)
        yield lambda typed: os.write(controller, typed)
    os.close(controller)


class FakeEngine(LLMEngine):
    """Engine without a model that answers "Because.", one character a step. Records what was asked of it."""

    def __init__(self, options: EngineOptions) -> None:
        config = make_config(
            max_num_seqs=options.max_num_seqs or 256, max_num_batched_tokens=2048, num_blocks=2048,
            max_model_len=options.max_model_len or 2048,
        )  # fmt: skip
        model = replace(config.model, generation_defaults={})
        decisions = (Decision("block_size", "4", "a CPU reads long runs"),)
        config = replace(config, options=options, model=model, batch_invariant=False, decisions=decisions)
        super().__init__(config, ScriptedExecutor(config.scheduler, saying(ANSWER)), byte_tokenizer(CHAT_TEMPLATE))
        self.prompts: list[Any] = []
        self.params: list[Any] = []
        self.on_step: Callable[[], object] = lambda: None
        self.was_shut_down = False
        self.startup_times = {"weights": 0.25}

    def add_request(self, request_id: str, prompt: Any, params: Any, **settings: Any) -> None:
        super().add_request(request_id, prompt, params, **settings)
        self.prompts.append(prompt)
        self.params.append(params)

    def step(self) -> list[Any]:
        self.on_step()
        return super().step()

    def shutdown(self) -> None:
        self.was_shut_down = True
        super().shutdown()
