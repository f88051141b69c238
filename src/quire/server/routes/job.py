"""`Job`: a checked and tokenised request to generate text; `Chunks`: its answer as a stream of OpenAI chunks.

Chat and plain completions share both. Next to read: `chat.py`, `completions.py`, `../streaming.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire.engine.process.messages import RequestUpdate
from quire.outputs import CompletionOutput
from quire.server.front_end import FrontEnd, PromptTokens
from quire.server.generation import timestamp
from quire.server.logprobs import LogprobWriter
from quire.server.protocol.answers import FINGERPRINT
from quire.server.protocol.fields import ChoiceFields, StreamOptions
from quire.server.streaming import DONE, EventWriter, TextEvent, event
from quire.types import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request to generate text, checked and tokenised.

    `num_top` is the number of top log-probabilities; None without log-probabilities. `scores_only`: the one generated
    token is not shown.
    """

    body: ChoiceFields
    front_end: FrontEnd
    model: str
    answer_id: str
    requests: list[RequestSpec]
    prompts: list[PromptTokens]
    num_top: int | None = None
    scores_only: bool = False
    created: int = field(default_factory=timestamp)

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that an answer and all of its chunks begin with."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def answer(self, kind: str, choices: list[dict[str, Any]], results: list[RequestUpdate]) -> dict[str, Any]:
        """Return the whole answer."""
        num_generated = 0
        if not self.scores_only:
            num_generated = sum(len(choice.token_ids) for update in results for choice in update.choices)
        usage = self.usage(num_generated, results)
        return {**self.head(kind), "choices": choices, "usage": usage, **self.timings(num_generated, results[0])}

    def usage(self, num_generated: int, last: Sequence[RequestUpdate]) -> dict[str, Any]:
        """Return OpenAI's `usage` of all prompts. `last`: the latest update of each request that has one."""
        num_prompt = sum(request.num_prompt_tokens for request in self.requests)
        details = {"cached_tokens": sum(update.num_cached_tokens for update in last)}
        num_truncated = sum(prompt.num_truncated for prompt in self.prompts)
        if num_truncated:  # these are not in `num_prompt`
            details["truncated_tokens"] = num_truncated
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": details,
        }

    def timings(self, num_generated: int, last: RequestUpdate) -> dict[str, Any]:
        """Return llama.cpp's `timings` as a field; empty for several prompts, and before the end."""
        if len(self.requests) > 1:
            return {}
        times = timings(self.requests[0].num_prompt_tokens, num_generated, last)
        return {} if times is None else {"timings": times}

    def logprob_writer(self) -> LogprobWriter | None:
        """Return a writer of one text's log-probabilities; None if they are not wanted."""
        if self.num_top is None:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return LogprobWriter(self.front_end.tokenizer, self.num_top, as_ids=as_ids)


class Chunks(EventWriter):
    """Writes the updates of one answer as OpenAI chunks, and counts its tokens. Subclasses write choices.

    Most requests want text only: the chunks between a choice's first and last then differ in one string.
    """

    kind: str

    def __init__(self, job: Job) -> None:
        options = job.body.stream_options or StreamOptions()
        self._job = job
        self._head = job.head(self.kind)
        self._has_usage = bool(options.include_usage)
        self._has_running_usage = self._has_usage and bool(options.continuous_usage_stats)
        self._has_extras = job.num_top is not None or bool(job.body.return_token_ids) or self._has_running_usage
        self._is_plain = not self._has_extras and not job.scores_only
        self._texts: dict[tuple[int, int], TextEvent] = {}
        self._num_generated = 0
        self._last: dict[int, RequestUpdate] = {}

    def choices(self, index: int, choice: CompletionOutput, update: RequestUpdate) -> list[dict[str, Any]]:
        """Return the choices of the chunks for an update of prompt `index`."""
        raise NotImplementedError

    def of(self, index: int, update: RequestUpdate) -> bytes:
        """Return the chunks of an update. Mutates: the count of tokens."""
        self._last[index] = update
        data = b""
        for choice in update.choices:
            if not self._job.scores_only:
                self._num_generated += len(choice.token_ids)
            is_plain, key = self._is_plain and choice.finish_reason is None, (index, choice.index)
            if is_plain and key in self._texts:
                data += self._texts[key].encode(choice.text) if choice.text else b""
                continue
            written = self.choices(index, choice, update)
            is_last = update.finished and choice is update.choices[-1] and not self._has_usage
            extra = self._job.timings(self._num_generated, update) if is_last else {}
            for position, item in enumerate(written, 1):
                data += self.chunk(item, extra if position == len(written) else {})
            if is_plain and written:  # an echoed prompt goes with the first text
                self._texts[key] = TextEvent(partial(self._text_chunk, *key))
        return data

    def _text_chunk(self, index: int, choice: int, text: str) -> bytes:
        (item,) = self.choices(index, CompletionOutput(choice, text, []), RequestUpdate(""))
        return self.chunk(item, {})

    def closing(self) -> bytes:
        """Return the usage, if the request asked for it, and the end."""
        if not self._has_usage:
            return DONE
        timed = self._job.timings(self._num_generated, next(reversed(self._last.values())))
        return event({**self._head, "choices": [], "usage": self._usage(), **timed}) + DONE

    def chunk(self, choice: dict[str, Any], extra: dict[str, Any]) -> bytes:
        """Return one chunk; `extra` are fields beside its choice."""
        content = {**self._head, "choices": [choice], **extra}
        if self._has_usage:
            content["usage"] = self._usage() if self._has_running_usage else None
        return event(content)

    def _usage(self) -> dict[str, Any]:
        return self._job.usage(self._num_generated, list(self._last.values()))


def timings(num_prompt: int, num_generated: int, last: RequestUpdate) -> dict[str, Any] | None:
    """Return llama.cpp's `timings` of a finished request; None if its times are unknown.

    `prompt_ms` is from the first step of the request to its first token, `predicted_ms` from there to the last one.
    Units: `_ms` milliseconds; `_per_second` tokens per second, 0 if the time is 0.
    """
    metrics = last.metrics
    if metrics is None or metrics.first_token_time_s is None or metrics.last_token_time_s is None:
        return None
    start_s = metrics.arrival_time_s if metrics.first_scheduled_time_s is None else metrics.first_scheduled_time_s
    num_computed = num_prompt - last.num_cached_tokens
    prompt_ms = max(0.0, (metrics.first_token_time_s - start_s) * 1e3)
    predicted_ms = max(0.0, (metrics.last_token_time_s - metrics.first_token_time_s) * 1e3)
    return {
        "cache_n": last.num_cached_tokens,
        **_speed("prompt", num_computed, prompt_ms),
        **_speed("predicted", num_generated, predicted_ms),
    }


def _speed(name: str, num_tokens: int, duration_ms: float) -> dict[str, Any]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": duration_ms,
        f"{name}_per_token_ms": duration_ms / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens * 1e3 / duration_ms if duration_ms else 0.0,
    }
