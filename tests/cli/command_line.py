"""A command line to call, and an engine that answers without a model."""

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from click.testing import CliRunner, Result

from quire.cache_spec import CacheGroup, PagedKV
from quire.cli.command import LEVEL_VARIABLE
from quire.cli.main import cli
from quire.config import Decision, EngineOptions
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.text.rendered_chat import RenderedChat


def call(*arguments: str, stdin: str | None = None) -> Result:
    """Run one command line in this process. Click's runner has no terminal: `isatty` is false."""
    # The command line sets the variable for its child processes; servers of later tests must not log each request.
    environment = {LEVEL_VARIABLE: os.environ.get(LEVEL_VARIABLE)}
    return CliRunner(env=environment).invoke(cli, list(arguments), input=stdin)


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


class FakeTokenizer:
    """Tokenizer with a token per character."""

    vocab_size = 256
    special_token_ids = frozenset({0})
    chat_template = "fake"
    byte_decoding = None
    bos_token_id, eos_token_id = None, 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("latin-1", "replace"))

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("latin-1")

    def id_to_token(self, token_id: int) -> str:
        return chr(token_id)

    def render_chat(self, messages: list[dict[str, str]], **settings: Any) -> RenderedChat:
        return RenderedChat(("".join(f"{message['role']}: {message['content']}\n" for message in messages),))

    def encode_chat(self, chat: RenderedChat) -> list[int]:
        return self.encode(chat.text)


@dataclass
class _Running:
    output: RequestOutput
    params: SamplingParams


class FakeEngine:
    """Answers every request with `answer`, one character a step. Records what was asked of it."""

    def __init__(self, options: EngineOptions, answer: str = "Because.") -> None:
        self.answer = answer
        self.tokenizer: Any = FakeTokenizer()
        self.chat_template = None
        self.dead_error: Exception | None = None
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.on_step: Any = None
        self.was_shut_down = False
        self.startup_times = {"weights": 0.25}
        self._running: dict[str, _Running] = {}
        self.config = SimpleNamespace(
            options=options,
            dtype="float32",
            kv_dtype="float32",
            weight_bytes=6_000_000,
            uses_plan=True,
            batch_invariant=False,
            device="cpu",
            hardware=SimpleNamespace(num_threads=2, name="a CPU"),
            model=SimpleNamespace(
                architecture="FakeForCausalLM",
                num_parameters=1_500_000,
                vocab_size=256,
                generation_defaults={},
                hidden_size=64,
                num_layers=2,
                num_heads=4,
                head_size=16,
                hf_config={},
            ),
            scheduler=SimpleNamespace(
                max_model_len=options.max_model_len or 2048,
                block_size=32,
                num_blocks=9,
                max_num_batched_tokens=64,
                kv_cache_groups=(CacheGroup((0, 1), PagedKV(1, 16, 4)),),
            ),
            decisions=(Decision("block_size", "32", "a CPU reads long runs"),),
        )

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> None:
        self.prompts.append(prompt)
        self.params.append(params)
        ids = prompt.get("prompt_token_ids") or self.tokenizer.encode(prompt["prompt"])
        completions = [CompletionOutput(index, "", []) for index in range(params.n)]
        self._running[request_id] = _Running(
            RequestOutput(request_id, prompt.get("prompt"), ids, completions, False), params
        )

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            for completion in self._running[request_id].output.outputs:
                completion.finish_reason = "abort"

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        if self.on_step is not None:
            self.on_step()
        outputs = []
        for request_id, running in list(self._running.items()):
            for completion in running.output.outputs:
                self._advance(completion, running.params)
            running.output.finished = all(item.finished for item in running.output.outputs)
            copies = [replace(item, token_ids=list(item.token_ids)) for item in running.output.outputs]
            outputs.append(replace(running.output, outputs=copies))
            if running.output.finished:
                del self._running[request_id]
        return outputs

    def _advance(self, completion: CompletionOutput, params: SamplingParams) -> None:
        if completion.finished:
            return
        position = len(completion.token_ids)
        character = self.answer[position % len(self.answer)]
        completion.token_ids.append(ord(character))
        completion.text += character
        if position + 1 == len(self.answer) and not params.ignore_eos:
            completion.finish_reason = "stop"
        elif position + 1 == params.max_tokens:
            completion.finish_reason = "length"

    def shutdown(self) -> None:
        self.was_shut_down = True
