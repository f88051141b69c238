"""Answers of a server, for the chat of `chat.py` and for one-shot questions.

Next to read: `server_client.py`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.cli.chat import Message, Reply
from quire.cli.output import format_seconds
from quire.cli.server_client import ServerAnswerError, ServerClient
from quire.errors import ModelNotFoundError, QuireError
from quire.sampling_params import SamplingParams

PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class ServedModel:
    """A model of a server; `max_model_len` is None where the server does not tell."""

    name: str
    max_model_len: int | None = None


def find_model(client: ServerClient, name: str | None) -> ServedModel:
    """The model of this name, else the server's first. Raises: ModelNotFoundError if the server lists none.

    A name that the server does not list is taken as it is: the server decides.
    """
    try:
        listed = client.get_json("/v1/models")
        cards = [card for card in listed["data"] if isinstance(card.get("id"), str)]
    except ServerAnswerError as error:
        if name is None or error.http_status in (401, 403):
            raise
        cards = []
    except (KeyError, TypeError, AttributeError):
        cards = []
    if name is None and not cards:
        raise ModelNotFoundError(f"{client.url} lists no model: name one with --model")
    chosen: dict[str, Any] = next((card for card in cards if name in (None, card["id"])), {"id": name})
    length = chosen.get("max_model_len")
    return ServedModel(str(chosen["id"]), length if isinstance(length, int) and length > 0 else None)


def request_body(model: str, messages: Sequence[Message], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion's body. Sampling values keep their names, but `logprobs`, which OpenAI splits in two."""
    body: dict[str, Any] = {"model": model, "messages": list(messages), **chosen}
    form = chosen.get("structured_outputs")
    if form is not None:
        body["structured_outputs"] = {name: value for name, value in asdict(form).items() if value not in (None, False)}
    if "logprobs" in chosen:
        body |= {"logprobs": True, "top_logprobs": chosen["logprobs"]}
    return body


@dataclass
class StreamedAnswer:
    """What has come of one answer. Times in seconds, from sending the request."""

    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    num_pieces: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    interrupted: bool = False

    def take(self, event: Mapping[str, Any], since_start_s: float) -> str:
        """Take one event in; returns the text that it brought."""
        self.usage = event.get("usage") or self.usage
        self.timings = event.get("timings") or self.timings
        text = ""
        for choice in event.get("choices") or ():
            text += (choice.get("delta") or {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self.first_s = since_start_s if self.first_s is None else self.first_s
            self.last_s, self.num_pieces, self.text = since_start_s, self.num_pieces + 1, self.text + text
        return text

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the server's prefix cache had."""
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    @property
    def tokens_per_s(self) -> float | None:
        """The server's measurement, else what came after the first piece; None if there was only that."""
        measured = self.timings.get("predicted_per_second")
        if measured:
            return float(measured)
        num_tokens = int(self.usage.get("completion_tokens") or 0) or self.num_pieces
        took_s = self.last_s - (self.first_s or 0.0)
        return (num_tokens - 1) / took_s if num_tokens > 1 and took_s > 0 else None

    def statistics_line(self, max_model_len: int | None) -> str:
        """As of `quire run`; an answer that was stopped has no usage, so its pieces of text are counted."""
        reason = "interrupted" if self.interrupted else self.finish_reason or "no finish reason"
        parts = [f"[{reason}]"]
        if self.usage:
            num_prompt = int(self.usage.get("prompt_tokens") or 0)
            num_new = int(self.usage.get("completion_tokens") or 0)
            cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
            parts = [f"[{reason}] prompt {num_prompt} tok{cached}", f"{num_new} new"]
        else:
            parts = [f"[{reason}] {self.num_pieces} pieces of text"]
        if self.first_s is not None:
            parts.append(f"TTFT {format_seconds(self.first_s)}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        if self.usage and max_model_len is not None:
            used = num_prompt + num_new
            parts.append(f"ctx {used}/{max_model_len} ({100 * used / max_model_len:.0f}%)")
        return " · ".join(parts)


class ServerAnswerer:
    """Answers a chat with a server; see `Answerer`."""

    def __init__(self, client: ServerClient, model: ServedModel, defaults: Mapping[str, Any]) -> None:
        """`defaults`: sampling values that hold unless others are chosen."""
        self._client = client
        self._model = model
        self._defaults = dict(defaults)

    def check(self, chosen: Mapping[str, Any]) -> None:
        """Raises: InvalidParameterError."""
        SamplingParams(**{**self._defaults, **chosen})

    def answer(
        self, messages: Sequence[Message], chosen: Mapping[str, Any], on_text: Callable[[str], None] | None
    ) -> Reply:
        """Answer a conversation; Ctrl-C closes the connection. Raises: ServerUnreachableError, ServerAnswerError."""
        body = request_body(self._model.name, messages, {**self._defaults, **chosen})
        body["stream_options"] = {"include_usage": True}
        answer = StreamedAnswer()
        start_s = time.perf_counter()
        with closing(self._client.stream(PATH, body)) as events:
            try:
                for event in events:
                    text = answer.take(event, time.perf_counter() - start_s)
                    if text and on_text is not None:
                        on_text(text)
            except KeyboardInterrupt:
                answer.interrupted = True
            except QuireError:
                if answer.text and on_text is not None:
                    on_text("\n")  # the error gets a line of its own
                raise
        line = answer.statistics_line(self._model.max_model_len)
        return Reply(answer.text, line, time.perf_counter() - start_s, answer.interrupted)
