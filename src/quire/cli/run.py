"""`quire run`: one answer to one prompt, streamed; or a chat when there is no prompt and a terminal to type on.

The engine runs in this process: `open_engine` and `generate` serve other verbs, too, and know its public methods and no
tensors. The first Ctrl-C ends the generation, the second one the command. Text goes to stdout; reasoning, calls of
tools and the line of statistics to stderr. Next to read: `chat.py`.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import click

from quire.byte_sizes import format_bytes
from quire.cli.chat import DEFAULT_MAX_TOKENS, Chat, Message, Reply, chat_to_continue, continue_option, statistics_line
from quire.cli.command import ExitCode, option, output_of, verb
from quire.cli.options import OF_SERVE, chosen_options, option_flags, prompt_form, read_prompt, split_arguments
from quire.cli.terminal import Output, format_seconds, show_progress
from quire.config import EngineOptions
from quire.engine.interrupts import interrupts_between_steps
from quire.errors import ConfigError, EngineError, ModelNotFoundError
from quire.garbage import without_collections
from quire.memory_plan import kv_bytes
from quire.outputs import ChatCompletionOutput, CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.weights.sources import ModelFiles, resolve_source

if TYPE_CHECKING:
    from quire.engine.chat import Conversation
    from quire.engine.llm_engine import LLMEngine
    from quire.text.dialogue import DialogueOptions

# --- The engine of a verb -------------------------------------------------------------------------

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


# --- `quire run` ----------------------------------------------------------------------------------

HELP = f"""Answer one prompt, or chat.

A single argument is a MODEL if it is one plain word, a path or a hub id (org/name), and otherwise the PROMPT for
the default model. Of several GGUF files, org/name:Q4_K_M or DIRECTORY:Q4_K_M chooses one. Piped input is a prompt, too:
given both, the request is the input, a blank line and the PROMPT. -f FILE takes the place of piped input. Without any
of them, on a terminal, a chat starts; /save NAME keeps it, and /load NAME or --continue goes on with it. PROMPT "-" is
piped input alone. The answer has at most {DEFAULT_MAX_TOKENS} tokens unless --max-tokens says otherwise.
"""
EXAMPLES = (
    'quire run "Why is the sky blue?"',
    "quire run smollm2 --temperature 0 --max-tokens 64 < question.txt",
    'quire run ./model.gguf "Summarise this." -f notes.txt',
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TIMINGS = ("time_to_first_token_s", "decode_s", "total_s", "decode_tokens_per_s")


@verb("run", EXAMPLES, help=HELP)
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]")
@option("--system", metavar="TEXT", help="system message of the chat")
@option("-f", "--file", metavar="FILE", help="file with the prompt; - is standard input")
@option("--raw", is_flag=True, help="continue the text itself, without the chat template")
@option("--tools", "tools_file", metavar="FILE", help="JSON file with a list of tools, in the chat API's format")
@option("--reasoning-effort", type=click.Choice(EFFORTS), help="how much a model that thinks should think")
@option(
    "--reasoning-budget",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    help="most tokens of reasoning before its end is forced",
)
@continue_option
@option_flags(SamplingParams, defaults={"max_tokens": str(DEFAULT_MAX_TOKENS)})
@option_flags(EngineOptions, without=OF_SERVE | {"seed"})
def run_command(
    words: tuple[str, ...],
    system: str | None,
    file: str | None,
    raw: bool,
    tools_file: str | None,
    reasoning_effort: str | None,
    reasoning_budget: int | None,
    continues: bool,
    **values: Any,
) -> None:
    """Decide between one answer and a chat, check the parameters, then load the model."""
    ctx = click.get_current_context()
    output = output_of(ctx)
    engine_values, chosen = chosen_options(values, EngineOptions), chosen_options(values, SamplingParams)
    if chosen.get("seed") is not None:
        engine_values["seed"] = chosen["seed"]
    arguments = split_arguments(words, engine_values, what="prompt")
    options = EngineOptions.from_kwargs(**{**engine_values, "model": arguments.model})
    SamplingParams(**{"max_tokens": None, **chosen})  # a bad value must not wait for the model to load
    if raw and (system or tools_file):
        name = "--system" if system else "--tools"
        raise click.UsageError(f"{name} needs the chat template, --raw leaves it out: use one of them")
    tools = read_tools(tools_file)
    from quire.text.dialogue import DialogueOptions  # loads tokenizers, which help does without

    dialogue = DialogueOptions(reasoning_effort=reasoning_effort, reasoning_budget=reasoning_budget)
    has_more = bool(system or file or raw) or arguments.text is not None
    saved_name = chat_to_continue(has_more=has_more) if continues else None
    text = None if continues else read_prompt(arguments.text, missing=arguments.missing_text, file=file)
    if text is None and (output.json or raw):
        raise click.UsageError(f"{'--json' if output.json else '--raw'} needs a prompt: give one, or pipe it in")
    try:
        needs = "a chat" if text is None else "--system" if system else "--tools" if tools_file else None
        with open_engine(options, output, chat_for=needs) as engine:
            chat = ChatEngine(engine, output, tools=tools, options=dialogue)
            if text is None:
                Chat(
                    chat.ask,
                    lambda some: vars(sampling_params_for(engine, some)),
                    output,
                    chosen,
                    system=system,
                    saved_name=saved_name,
                ).loop()
                return
            streams = chosen.get("n", 1) == 1 and not output.json
            with output.answer() if streams else nullcontext() as on_text:
                if raw or continues_text(engine, output):
                    generation = generate(engine, {"prompt": text}, sampling_params_for(engine, chosen), on_text)
                else:
                    messages = [{"role": "system", "content": system}] if system else []
                    generation, _ = chat.generate([*messages, {"role": "user", "content": text}], chosen, on_text)
            _end(engine, output, generation, streams=streams)
    except ModelNotFoundError as error:
        if len(words) != 1 or arguments.text is not None:
            raise
        raise ModelNotFoundError(f"{error.message}; {prompt_form(words[0])}") from error  # it may be a prompt
    if output.json:
        output.result_json("quire.run/1", {"model": options.model, **generation_json(generation)})
    if generation.interrupted:
        ctx.exit(ExitCode.INTERRUPTED)


def _end(engine: "LLMEngine", output: Output, generation: Generation, *, streams: bool) -> None:
    """End a streamed text with a line break, or write several to stdout, except with --json; statistics to stderr."""
    completions = generation.output.outputs
    if streams:
        if not completions[0].text.endswith("\n"):
            output.result()
    elif not output.json:
        for completion in completions:
            output.result(f"[{completion.index + 1}/{len(completions)}]\n{_content(completion)}")
    output.note(generation.statistics_line(engine.config.scheduler.max_model_len))


def _content(completion: CompletionOutput) -> str:
    """Return the text of a completion without reasoning and calls."""
    return completion.message["content"] or "" if isinstance(completion, ChatCompletionOutput) else completion.text


def read_tools(path: str | None) -> list[dict[str, Any]] | None:
    """Return the tools in a file. Raises: ConfigError."""
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--tools {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, list):
        raise ConfigError(f"--tools {path} must hold a JSON list of tools, such as [{{'type': 'function', …}}]")
    return found


def generation_json(generation: Generation) -> dict[str, Any]:
    """Return the result of one request as it appears in JSON."""
    output = generation.output
    completions = [_completion_json(completion) for completion in output.outputs]
    first = {name: completions[0][name] for name in ("text", "token_ids", "finish_reason", "stop_reason")}
    return {
        **first,
        **({"finish_reason": "abort"} if generation.interrupted else {}),
        "prompt": output.prompt,
        "num_prompt_tokens": generation.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "num_generated_tokens": generation.num_generated_tokens,
        "timings": {name: getattr(generation, name) for name in TIMINGS},
        "completions": completions,
        "prompt_logprobs": _logprobs_json(output.prompt_logprobs),
    }


def _completion_json(completion: CompletionOutput) -> dict[str, Any]:
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason", "cumulative_logprob")
    message = {"message": completion.message} if isinstance(completion, ChatCompletionOutput) else {}
    found = {name: getattr(completion, name) for name in names} | message
    return found | {"logprobs": _logprobs_json(completion.logprobs)}


def _logprobs_json(positions: Any) -> list[list[dict[str, Any]] | None] | None:
    """Return the tokens of each position in their order; None where the position has none."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else [
            {"token_id": token_id, "text": item.decoded_token, "logprob": item.logprob, "rank": item.rank}
            for token_id, item in position.items()
        ]
        for position in positions
    ]
