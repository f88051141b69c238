"""An engine without a model: a scripted executor, a byte tokenizer, small configs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.cache_spec import CacheGroup, PagedKV
from quire.config import EngineConfig, EngineOptions, Hardware, ModelConfig, SchedulerConfig
from quire.engine.llm_engine import LLMEngine
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_parts import TokenizerParts
from quire.types import TokenLogprobs
from tests.fakes import FakeExecutor, FakeSequence
from tests.scheduler.integrity import check_integrity
from tests.scheduler.recording import RecordingScheduler

if TYPE_CHECKING:
    from quire.parallel.executor import Executor

EOS = 256
VOCAB_SIZE = 260
"""256 bytes, then <eos>, <user>, <assistant> and one token that the tokenizer does not know."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Output = RequestOutput | PoolingRequestOutput
NextToken = Callable[[list[int], int, int], int]
"""(known tokens, number of them that are prompt, seed) → next token."""
Logprobs = Callable[[list[int]], list[float]]
"""Known tokens → log-probability of each next token [V]."""


def byte_tokenizer(chat_template: str = CHAT_TEMPLATE) -> Tokenizer:
    """Return a tokenizer with a token per UTF-8 byte: most characters beyond ASCII are several tokens."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=_byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<user>", "<assistant>"])
    return Tokenizer(TokenizerParts(backend, None, EOS, {}, {"default": chat_template}))


def _byte_alphabet() -> dict[str, int]:
    """Return the visible character that byte-level BPE writes for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [value for value in range(256) if value not in visible]
    return {chr(value): value for value in visible} | {chr(256 + rank): value for rank, value in enumerate(hidden)}


def add_with_news(engine: LLMEngine, request_id: str, prompt: Any, params: Any, **options: Any) -> None:
    """Queue a request as the engine's process does: each output has what is new since the one before."""
    prepared = engine.input_processor.prepare(request_id, prompt, params, **options)
    engine.submit(replace(prepared, tells_news=True))


def saying(text: str, *, then: int = EOS) -> NextToken:
    """Generate the bytes of `text`, then `then` for ever."""
    token_ids = list(text.encode())

    def next_token(known: list[int], num_prompt_tokens: int, seed: int) -> int:
        position = len(known) - num_prompt_tokens
        return token_ids[position] if position < len(token_ids) else then

    return next_token


def mixing(known: list[int], num_prompt_tokens: int, seed: int) -> int:
    """Return a letter that depends on all tokens and the seed."""
    value = seed & 0xFFFF
    for token_id in known:
        value = (value * 31 + token_id + 7) % 65521
    return 97 + value % 26


class ScriptedExecutor(FakeExecutor):
    """Checks every step as `FakeExecutor` does; its tokens and log-probabilities come from functions."""

    def __init__(
        self, config: SchedulerConfig, next_token: NextToken = mixing, logprobs: Logprobs | None = None
    ) -> None:
        super().__init__(config, vocab_size=VOCAB_SIZE)
        self.next_token = next_token
        self.logprobs = logprobs or (lambda known: [-math.log(VOCAB_SIZE)] * VOCAB_SIZE)
        self.errors: dict[str, str] = {}
        self.error_code: str | None = None
        """Request id → the error that it gets in place of a token or an embedding."""
        self.in_step: Callable[[int], None] = lambda step: None
        """Called in the middle of each step with the number of steps so far."""

    def _on_computed(self) -> None:
        self.in_step(self.num_steps)

    def _failure(self, sequence: FakeSequence) -> tuple[str, str | None] | None:
        error = self.errors.get(sequence.new.request_id)
        return None if error is None else (error, self.error_code)

    def _token(self, sequence: FakeSequence, digest: int) -> int:
        new = sequence.new
        return self.next_token(sequence.token_ids, new.num_prompt_tokens, new.seed)

    def _embedding(self, sequence: FakeSequence, digest: int) -> tuple[float, ...]:
        return (float(len(sequence.token_ids)), float(sequence.token_ids[-1]))

    def _logprobs(self, known: list[int], token_id: int, num: int) -> TokenLogprobs:
        values = self.logprobs(list(known))
        order = sorted(range(len(values)), key=lambda index: -values[index])
        rank_of = {index: rank for rank, index in enumerate(order, 1)}
        ids = [token_id, *(index for index in order[: num if num >= 0 else None] if index != token_id)]
        return TokenLogprobs(tuple(ids), tuple(values[i] for i in ids), tuple(rank_of[i] for i in ids))


def make_config(options: dict[str, Any] | None = None, **scheduler: Any) -> EngineConfig:
    """Return a config of few small blocks from fields of `SchedulerConfig`; `options`: fields of `EngineOptions`."""
    model = ModelConfig(
        architecture="ScriptedModel", hf_config={}, vocab_size=VOCAB_SIZE, hidden_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_size=8, context_len=256, num_parameters=1, cache_specs=(),
        eos_token_ids=(EOS,), generation_defaults={"temperature": 0.5},
    )  # fmt: skip
    values: dict[str, Any] = {
        "max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 128, "block_size": 4, "num_blocks": 200,
        "kv_cache_groups": (CacheGroup((0,), PagedKV(1, 8, 4)),),
    } | scheduler  # fmt: skip
    hardware = Hardware("cpu", 2**33, 2**33, has_fast_bfloat16=False, num_threads=1)
    return EngineConfig(
        EngineOptions(**(options or {})), model, hardware, "cpu", "float32", "float32",
        SchedulerConfig(**values), (),
    )  # fmt: skip


def make_engine(
    next_token: NextToken = mixing,
    logprobs: Logprobs | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    has_tokenizer: bool = True,
    options: dict[str, Any] | None = None,
    wrap: "Callable[[ScriptedExecutor], Executor]" = lambda executor: executor,
    records: bool = False,
    **scheduler: Any,
) -> tuple[LLMEngine, ScriptedExecutor]:
    """Return an engine and its executor. `wrap` may change the executor; `records`: the scheduler records its calls."""
    config = make_config(options, **scheduler)
    executor = ScriptedExecutor(config.scheduler, next_token, logprobs)
    if has_tokenizer and tokenizer is None:
        tokenizer = byte_tokenizer()
    recording = RecordingScheduler(config.scheduler) if records else None
    return LLMEngine(config, wrap(executor), tokenizer, scheduler=recording), executor


def run(engine: LLMEngine, max_steps: int = 10_000) -> list[Output]:
    """Step until nothing is left; all outputs in order."""
    outputs: list[Output] = []
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return outputs
        outputs += engine.step()
        check_integrity(engine.scheduler)
    raise AssertionError(f"still unfinished after {max_steps} steps")


def finals(outputs: Sequence[Output]) -> dict[str, Any]:
    """Return the last output of each request; fails if one has two."""
    found: dict[str, Output] = {}
    for output in outputs:
        if output.finished:
            assert output.request_id not in found, f"{output.request_id} ended twice"
            found[output.request_id] = output
    return found


def assert_all_home(engine: LLMEngine) -> None:
    """Check that nothing runs, nothing waits, and no request owns a block."""
    assert not engine.has_unfinished_requests()
    assert not engine.scheduler.has_unfinished
    check_integrity(engine.scheduler)
    assert engine.reset_prefix_cache(), "some request still owns blocks"


def assert_forgotten(engine: LLMEngine, executor: ScriptedExecutor) -> None:
    """Check that the next step that computes something tells the executor of the requests that ended."""
    engine.add_request("the only one", [1], SamplingParams(max_tokens=1))
    run(engine)
    assert executor.known_ids == {"the only one"}
