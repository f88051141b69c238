"""`quire chat`: a chat, or one question, with any server that speaks OpenAI's API.

Text goes to stdout, the line of statistics to stderr. Next to read: `chat.py`, `chat_client_answers.py`.
"""

from typing import Any

import click

from quire.cli.arguments import read_word
from quire.cli.chat import Chat, Message
from quire.cli.chat_client_answers import PATH, ServedModel, ServerAnswerer, find_model, request_body
from quire.cli.command import GroupedOption, VerbCommand, output_of
from quire.cli.exit_codes import ExitCode
from quire.cli.options import chosen_sampling, sampling_options
from quire.cli.output import Output
from quire.cli.server_address import DEFAULT_URL
from quire.cli.server_client import ServerAnswerError, ServerClient
from quire.errors import PromptError
from quire.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 512
HELP = f"""Chat with a server of OpenAI's API, or ask it one question.

Without a PROMPT, standard input is read when it is piped; on a terminal a chat starts, with the commands of
`quire run`. PROMPT "-" reads standard input. Ctrl-C stops an answer, on the server too. An answer has at most
{DEFAULT_MAX_TOKENS} tokens unless --max-tokens says otherwise. The key is that of QUIRE_API_KEY, else of
OPENAI_API_KEY.
"""
EXAMPLES = (
    "quire chat",
    'quire chat "Why is the sky blue?" --url http://127.0.0.1:8000 --temperature 0',
    "quire chat --url https://models.example/v1 --model large < question.txt",
)


@click.command("chat", cls=VerbCommand, help=HELP, short_help="Chat with a server.", examples=EXAMPLES)
@click.argument("prompt", required=False)
@click.option("--url", default=DEFAULT_URL, envvar="QUIRE_URL", cls=GroupedOption,
              help=f"the server  [{DEFAULT_URL}; QUIRE_URL]")  # fmt: skip
@click.option("--model", metavar="NAME", cls=GroupedOption, help="the model's name there  [the server's first]")
@click.option("--system", metavar="TEXT", cls=GroupedOption, help="system message of the chat")
@sampling_options(defaults={"max_tokens": str(DEFAULT_MAX_TOKENS)})
def chat_command(prompt: str | None, url: str, model: str | None, system: str | None, **values: Any) -> None:
    """Check the parameters, then find the model and answer."""
    ctx = click.get_current_context()
    output = output_of(ctx)
    chosen = chosen_sampling(values)
    defaults = {"max_tokens": max(DEFAULT_MAX_TOKENS, chosen.get("min_tokens", 0))}
    params = SamplingParams(**{**defaults, **chosen})  # a bad value must not wait for a server
    text = _read_prompt(prompt)
    if text is None and output.json:
        raise click.UsageError("--json needs a prompt: give one, or pipe it in")
    with ServerClient(url) as client:
        served = find_model(client, model)
        answerer = ServerAnswerer(client, served, defaults)
        if text is None:
            output.note(f"{served.name} at {client.url}")
            Chat(answerer, output, chosen, system=system).loop()
            return
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        if output.json or params.n > 1:
            _answer_whole(client, output, served, messages, defaults | chosen)
            return
        reply = answerer.answer(messages, chosen, output.stream)
    if not reply.text.endswith("\n"):
        output.result()
    output.note(reply.statistics)
    if reply.interrupted:
        ctx.exit(ExitCode.INTERRUPTED)


def _read_prompt(prompt: str | None) -> str | None:
    """The question; None: ask the user. Raises: PromptError, click.UsageError."""
    if prompt == "":
        raise PromptError("the prompt is empty: give at least one character")
    return read_word(prompt, missing="no prompt was given")


def _answer_whole(
    client: ServerClient, output: Output, model: ServedModel, messages: list[Message], chosen: dict[str, Any]
) -> None:
    """One answer that is not streamed: as JSON, or several of them."""
    response = client.post(PATH, request_body(model.name, messages, chosen))
    try:
        texts = [str(choice["message"]["content"] or "") for choice in response["choices"]]
        first = response["choices"][0]
    except (KeyError, IndexError, TypeError):
        raise ServerAnswerError(200, f"{client.url} did not answer with a chat completion", "not_a_chat") from None
    if output.json:
        output.result_json("quire.chat/1", {
            "url": client.url, "model": response.get("model", model.name), "text": texts[0],
            "finish_reason": first.get("finish_reason"), "usage": response.get("usage"),
            "timings": response.get("timings"), "completions": [
                {"index": index, "text": text, "finish_reason": choice.get("finish_reason"),
                 "logprobs": choice.get("logprobs")}
                for index, (text, choice) in enumerate(zip(texts, response["choices"], strict=True))
            ],
        })  # fmt: skip
        return
    for index, text in enumerate(texts):
        output.result(f"[{index + 1}/{len(texts)}]\n{text}")
