"""The engine of a verb: opens with progress and notes, runs one request at a time, stops on Ctrl-C.

Knows the engine's public methods and no tensors. The first Ctrl-C ends the generation, the second one the command.
Next to read: `run.py`, `chat.py`.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from quire.byte_sizes import format_bytes
from quire.cli.chat import DEFAULT_MAX_TOKENS, Message, Reply, statistics_line
from quire.cli.output import Output, format_seconds
from quire.cli.progress import show_progress
from quire.config import EngineOptions
from quire.engine.interrupts import interrupts_between_steps
from quire.errors import ConfigError, EngineError
from quire.garbage import without_collections
from quire.memory_plan import kv_bytes
from quire.outputs import ChatCompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.weights.sources import ModelFiles, resolve_source

if TYPE_CHECKING:
    from quire.engine.chat import Conversation
    from quire.engine.llm_engine import LLMEngine
    from quire.text.dialogue import DialogueOptions

NO_TEMPLATE = "the model has no chat template and continues the text; --chat-template FILE makes it answer"
_REQUEST_IDS: "WeakKeyDictionary[LLMEngine, Iterator[int]]" = WeakKeyDictionary()
"""Numbers of an engine's requests: equal runs have equal recordings."""


@dataclass(frozen=True)
class Generation:
    """A finished or interrupted request and its times, in seconds."""

    output: RequestOutput
    time_to_first_token_s: float | None
    decode_s: float
    total_s: float
    interrupted: bool

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.output.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated, over all completions."""
        return sum(len(completion.token_ids) for completion in self.output.outputs)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second after the first one of each completion; None if there was only that."""
        num_decoded = self.num_generated_tokens - len(self.output.outputs)
        return num_decoded / self.decode_s if num_decoded > 0 and self.decode_s > 0 else None

    def statistics_line(self, max_model_len: int) -> str:
        """Return the line that follows the answer on stderr."""
        completions = self.output.outputs
        reason = "interrupted" if self.interrupted else str(completions[0].finish_reason)
        used = self.num_prompt_tokens + max(len(completion.token_ids) for completion in completions)
        return statistics_line(
            reason,
            self.num_prompt_tokens,
            self.output.num_cached_tokens,
            self.num_generated_tokens,
            self.time_to_first_token_s,
            self.decode_tokens_per_s,
            max_model_len,
            used,
        )


@contextlib.contextmanager
def open_engine(options: EngineOptions, output: Output, *, chat_for: str | None = None) -> Iterator["LLMEngine"]:
    """Build an engine, describe it on stderr, and shut it down at the end.

    `chat_for`: what the caller needs a chat template for. Raises: ConfigError before weights load if there is none.
    """
    start = time.perf_counter()
    with without_collections(), show_progress(output) as progress:
        # A missing model is reported before the engine is imported.
        files = resolve_source(options.model, revision=options.revision, progress=progress)
        if chat_for is not None:
            require_template(options, files, chat_for)
        from quire.engine.llm_engine import LLMEngine

        engine = LLMEngine.build(options, progress=progress)
    try:
        config, num_ranks = engine.config, options.num_ranks
        num_threads = max(1, config.hardware.num_threads // num_ranks)
        loaded = format_seconds(time.perf_counter() - start)
        threads = f"{num_threads} thread{'s' * (num_threads != 1)}" + " (tuned)" * bool(config.hardware.tuned)
        where = f"{options.describe_ranks()}, {threads} each" if num_ranks > 1 else f"{threads} · in-process"
        if not config.batch_invariant:
            where += " · batch_invariant off"
        output.note(
            f"{options.model} · {config.model.architecture} · {config.dtype} · {config.device} · "
            f"{where} · {format_bytes(kv_bytes(config))} of KV cache · ready in {loaded}"
        )
        for phase, seconds in engine.startup_times.items():
            output.detail(f"  {phase}: {format_seconds(seconds)}")
        for decision in config.decisions:
            output.detail(f"  {decision.name} = {decision.value}: {decision.reason}")
        yield engine
    finally:
        engine.shutdown()


def require_template(options: EngineOptions, files: ModelFiles, chat_for: str) -> None:
    """Raises: ConfigError if a model has no chat template and the options name none."""
    from quire.engine.tokenizer_source import has_chat_template

    if options.chat_template is None and not has_chat_template(files, options.tokenizer):
        raise ConfigError(
            f"{options.model} has no chat template, which {chat_for} needs: give it one with --chat-template FILE, or "
            "give a PROMPT alone, which the model continues"
        )


def continues_text(engine: "LLMEngine", output: Output) -> bool:
    """Return whether a model continues a prompt as it is, because it has no chat template; if so, write a note."""
    from quire.engine.chat import dialogue_of

    if dialogue_of(engine).has_template:
        return False
    output.note(NO_TEMPLATE)
    return True


def sampling_params_for(engine: "LLMEngine", chosen: Mapping[str, Any]) -> SamplingParams:
    """Merge `chosen` flags, the model's generation defaults, `DEFAULT_MAX_TOKENS` and those of `SamplingParams`.

    Raises: InvalidParameterError.
    """
    defaults = {"max_tokens": DEFAULT_MAX_TOKENS, **engine.config.model.generation_defaults}
    SamplingParams(**defaults)  # a bad default of the model is an error of its own
    defaults["max_tokens"] = max(defaults["max_tokens"], chosen.get("min_tokens", 0))
    return SamplingParams(**{**defaults, **chosen})


def generate(
    engine: "LLMEngine",
    prompt: dict[str, Any],
    params: SamplingParams,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Run one request to its end, or to Ctrl-C. `on_text` gets the first completion's text piece by piece.

    Raises: RequestError when the engine refuses the request, EngineError when it fails.
    """
    request_id = f"cli-{next(_REQUEST_IDS.setdefault(engine, itertools.count()))}"
    start = time.perf_counter()
    adapter = next(iter(engine.input_processor.adapters.names), None)  # the first that --lora names
    engine.add_request(request_id, prompt, params, lora_request=adapter)
    latest: RequestOutput | None = None
    first_s, last_s, num_shown, is_aborted = None, start, 0, False
    with interrupts_between_steps() as raise_if_interrupted:
        while engine.has_unfinished_requests():
            if not is_aborted:
                try:
                    raise_if_interrupted()
                except KeyboardInterrupt:
                    engine.abort_request([request_id])
                    is_aborted = True
            for output in engine.step():
                if not isinstance(output, RequestOutput) or output.request_id != request_id:
                    continue
                latest = output
                if not is_aborted:
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
                text = output.outputs[0].text
                if on_text is not None and len(text) > num_shown:
                    on_text(text[num_shown:])
                    num_shown = len(text)
    if latest is None or engine.dead_error is not None:
        raise engine.dead_error or EngineError("the engine ended without an answer")
    for completion in latest.outputs:
        if completion.error is not None:
            raise EngineError(completion.error)
    decode_s = last_s - first_s if first_s is not None else 0.0
    to_first = first_s - start if first_s is not None else None
    return Generation(latest, to_first, decode_s, last_s - start, is_aborted)


def chat_of(
    engine: "LLMEngine",
    messages: Sequence[Message],
    params: SamplingParams,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: "DialogueOptions | None" = None,
) -> "Conversation":
    """Return a conversation ready for `generate`. Raises: ChatTemplateError, PromptError, InvalidParameterError."""
    from quire.engine.chat import Conversation, dialogue_of
    from quire.text.dialogue import DialogueOptions

    return Conversation.prepare(dialogue_of(engine), list(messages), tools, options or DialogueOptions(), params)


class ChatEngine:
    """Answers conversations with an engine, and shows them: content on stdout, reasoning and calls on stderr.

    `tools`, `options`: as `Dialogue.prepare` takes them.
    """

    def __init__(
        self,
        engine: "LLMEngine",
        output: Output,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: "DialogueOptions | None" = None,
    ) -> None:
        self._engine, self._output = engine, output
        self._tools, self._options = tools, options

    def ask(self, messages: Sequence[Message], chosen: Mapping[str, Any], on_text: Callable[[str], None]) -> Reply:
        """Answer a conversation of a chat. Raises: RequestError, EngineError."""
        generation, message = self.generate(messages, chosen, on_text)
        line = generation.statistics_line(self._engine.config.scheduler.max_model_len)
        return Reply(message, line, generation.total_s, generation.interrupted)

    def generate(
        self, messages: Sequence[Message], chosen: Mapping[str, Any], on_text: Callable[[str], None] | None
    ) -> tuple[Generation, Message]:
        """Return a generation, whose completions have messages, and the first message. Raises: as `ask`."""
        params = sampling_params_for(self._engine, chosen)
        chat = chat_of(self._engine, messages, params, self._tools, self._options)
        reader = chat.prepared.reply_reader()

        def show(text: str, *, ends: bool = False) -> None:
            if reader is None:
                on_text(text) if on_text is not None and text else None
                return
            for delta in reader.deltas(text, ends=ends):
                if content := delta.get("content"):
                    on_text(content) if on_text is not None else None
                elif reasoning := delta.get("reasoning"):
                    self._output.aside(reasoning)
                for call in delta.get("tool_calls", ()):
                    function = call["function"]
                    self._output.aside(f"{function['name']} " if function.get("name") else f"{function['arguments']}\n")

        generation = generate(self._engine, chat.prompt, chat.params, None if on_text is None else show)
        if on_text is not None:
            show("", ends=True)
        read = chat.read(generation.output)
        (message, *_) = [item.message for item in read.outputs if isinstance(item, ChatCompletionOutput)]
        return replace(generation, output=read), message
