"""`quire run`: one answer to one prompt, streamed; or a chat when there is no prompt and a terminal to type on.

The engine runs in this process. Text goes to stdout; reasoning, calls of tools and the line of statistics to stderr.
Next to read: `session.py`, `chat.py`.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.arguments import prompt_form, read_prompt, split_arguments
from quire.cli.chat import DEFAULT_MAX_TOKENS, Chat, chat_to_continue, continue_option
from quire.cli.command import option, output_of, verb
from quire.cli.exit_codes import ExitCode
from quire.cli.options import OF_SERVE, chosen_options, option_flags
from quire.cli.output import Output
from quire.cli.session import (
    ChatEngine,
    Generation,
    continues_text,
    generate,
    open_engine,
    sampling_params_for,
)
from quire.config import EngineOptions
from quire.errors import ConfigError, ModelNotFoundError
from quire.outputs import ChatCompletionOutput, CompletionOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

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
