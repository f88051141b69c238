"""`quire chat`: a chat, or one question, with any server that speaks OpenAI's API.

Text goes to stdout, the line of statistics to stderr. Next to read: `chat.py`, `server_client.py`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import click

from quire.cli.chat import (
    DEFAULT_MAX_TOKENS,
    Chat,
    Message,
    Reply,
    chat_to_continue,
    continue_option,
    statistics_line,
)
from quire.cli.command import ExitCode, option, output_of, verb
from quire.cli.options import chosen_options, option_flags, read_prompt
from quire.cli.server_client import (
    CHAT_PATH,
    ServedModel,
    ServerAnswerError,
    ServerClient,
    StreamedAnswer,
    find_model,
    find_url,
    served_model_option,
    url_option,
)
from quire.cli.terminal import Output, format_seconds
from quire.errors import QuireError
from quire.sampling_params import MODEL_DEFAULTS, SamplingParams

HELP = f"""Chat with a server of OpenAI's API, or ask it one question.

Piped input is a prompt, too: given both, the request is the input, a blank line and the PROMPT. Without either, on a
terminal, a chat starts, with the commands of `quire run`; /save NAME keeps it, and /load NAME or --continue goes on
with it. PROMPT "-" is piped input alone. Ctrl-C stops an answer, on the server too. An answer has at most
{DEFAULT_MAX_TOKENS} tokens unless --max-tokens says otherwise. The key is that of QUIRE_API_KEY, else of
OPENAI_API_KEY.
"""
EXAMPLES = (
    "quire chat",
    'quire chat "Why is the sky blue?" --url http://127.0.0.1:8000 --temperature 0',
    "quire chat --url https://models.example/v1 --model large < question.txt",
)


@verb("chat", EXAMPLES, help=HELP)
@click.argument("prompt", required=False)
@url_option
@served_model_option
@option("--system", metavar="TEXT", help="system message of the chat")
@continue_option
@option_flags(SamplingParams, defaults={"max_tokens": str(DEFAULT_MAX_TOKENS)})
def chat_command(
    prompt: str | None, url: str | None, model: str | None, system: str | None, continues: bool, **values: Any
) -> None:
    """Check the parameters, then find the model and answer."""
    ctx = click.get_current_context()
    output = output_of(ctx)
    chosen = chosen_options(values, SamplingParams)
    defaults = {"max_tokens": max(DEFAULT_MAX_TOKENS, chosen.get("min_tokens", 0))}
    params = SamplingParams(**{**defaults, **chosen})  # a bad value must not wait for a server
    saved_name = chat_to_continue(has_more=bool(system) or prompt is not None) if continues else None
    text = None if continues else read_prompt(prompt, missing="no prompt was given")
    if text is None and output.json:
        raise click.UsageError("--json needs a prompt: give one, or pipe it in")
    with ServerClient(find_url(url)) as client:
        served = find_model(client, model)

        def ask(messages: Sequence[Message], values: Mapping[str, Any], on_text: Callable[[str], None]) -> Reply:
            return ask_server(client, served, messages, {**defaults, **values}, on_text, output.aside)

        if text is None:
            output.note(f"{served.name} at {client.url}")
            Chat(
                ask,
                lambda values: all_values({**defaults, **values}),
                output,
                chosen,
                system=system,
                saved_name=saved_name,
            ).loop()
            return
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        if output.json or params.n > 1:
            _answer_whole(client, output, served, messages, defaults | chosen)
            return
        with output.answer() as on_text:
            reply = ask(messages, chosen, on_text)
    if not (reply.message["content"] or "").endswith("\n"):
        output.result()
    output.note(reply.statistics)
    if reply.interrupted:
        ctx.exit(ExitCode.INTERRUPTED)


def _answer_whole(
    client: ServerClient, output: Output, model: ServedModel, messages: list[Message], chosen: dict[str, Any]
) -> None:
    """Write an answer that is not streamed: as JSON, or several completions."""
    response = client.post(CHAT_PATH, request_body(model.name, messages, chosen))
    try:
        texts = [str(choice["message"]["content"] or "") for choice in response["choices"]]
        first = response["choices"][0]
    except (KeyError, IndexError, TypeError):
        raise ServerAnswerError(200, f"{client.url} did not answer with a chat completion", "not_a_chat") from None
    if output.json:
        output.result_json(
            "quire.chat/1",
            {
                "url": client.url,
                "model": response.get("model", model.name),
                "text": texts[0],
                "finish_reason": first.get("finish_reason"),
                "usage": response.get("usage"),
                "timings": response.get("timings"),
                "completions": [
                    {
                        "index": index,
                        "text": text,
                        "finish_reason": choice.get("finish_reason"),
                        "logprobs": choice.get("logprobs"),
                    }
                    for index, (text, choice) in enumerate(zip(texts, response["choices"], strict=True))
                ],
            },
        )
        return
    for index, text in enumerate(texts):
        output.result(f"[{index + 1}/{len(texts)}]\n{text}")


def request_body(model: str, messages: Sequence[Message], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat completion's body. Sampling values keep their names; OpenAI has two fields for `logprobs`."""
    body: dict[str, Any] = {"model": model, "messages": list(messages), **chosen}
    structured = chosen.get("structured_outputs")
    if structured is not None:
        fields = asdict(structured).items()
        body["structured_outputs"] = {name: value for name, value in fields if value not in (None, False)}
    if "logprobs" in chosen:
        body |= {"logprobs": True, "top_logprobs": chosen["logprobs"]}
    return body


def all_values(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return all sampling values; the server does not tell those of its model. Raises: InvalidParameterError."""
    return vars(SamplingParams(**chosen)) | {name: "the server's" for name in MODEL_DEFAULTS if name not in chosen}


def ask_server(
    client: ServerClient,
    model: ServedModel,
    messages: Sequence[Message],
    chosen: Mapping[str, Any],
    on_text: Callable[[str], None],
    on_reasoning: Callable[[str], None] = lambda text: None,
) -> Reply:
    """Answer a conversation; Ctrl-C closes the connection.

    `on_text` gets the content, `on_reasoning` the reasoning. Raises: ServerUnreachableError, ServerAnswerError.
    """
    body = {**request_body(model.name, messages, chosen), "stream_options": {"include_usage": True}}
    answer = StreamedAnswer(time.perf_counter())
    is_interrupted = False
    with closing(client.stream(CHAT_PATH, body)) as events:
        try:
            for event in events:
                before = len(answer.reasoning)
                text = answer.take(event, time.perf_counter())
                if reasoning := answer.reasoning[before:]:
                    on_reasoning(reasoning)
                if content := text[len(reasoning) :]:
                    on_text(content)
        except KeyboardInterrupt:
            is_interrupted = True
        except QuireError:
            if answer.text:
                on_text("\n")  # the error gets a line of its own
            raise
    line = _statistics_line(answer, "interrupted" if is_interrupted else None, model.max_model_len)
    return Reply(answer.message, line, time.perf_counter() - answer.started_s, is_interrupted)


def _statistics_line(answer: StreamedAnswer, interrupted: str | None, max_model_len: int | None) -> str:
    """Return the line of `quire run`; an answer without usage, such as a stopped one, has its pieces counted."""
    reason = interrupted or answer.finish_reason or "no finish reason"
    first_s = answer.time_to_first_s if answer.chunk_times else None
    if not answer.num_tokens:
        parts = [f"[{reason}] {len(answer.chunk_times)} pieces of text"]
        return " · ".join(parts + ([f"TTFT {format_seconds(first_s)}"] if first_s is not None else []))
    return statistics_line(
        reason,
        answer.num_prompt_tokens,
        answer.num_cached_tokens,
        answer.num_tokens,
        first_s,
        answer.tokens_per_s,
        max_model_len,
    )
