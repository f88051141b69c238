"""A chat answer as a stream of chunks.

The first event gives each choice its role; then one event per choice and update of the engine; each choice ends with an
event that says why. Most requests want text and nothing else: their chunks are made by `TextEvent`.
Next to read: `../streaming.py`.
"""

from typing import Any

from quire.engine.process.messages import ChoiceUpdate, RequestUpdate
from quire.server.protocol.answers import FINGERPRINT
from quire.server.routes.chat_job import ChatJob
from quire.server.state import ServerState
from quire.server.streaming import DONE, TextEvent, event
from quire.server.tools import ToolReader
from quire.server.usage import timings, usage


class ChatChunks:
    """Makes the events of one answer and counts its tokens."""

    def __init__(self, state: ServerState, job: ChatJob) -> None:
        body, options = job.body, job.body.stream_options
        self._job = job
        self._num_generated = 0
        self._last = RequestUpdate("")
        self._writer = job.logprob_writer(state.supervisor.front_end)
        self._has_usage = options is not None and bool(options.include_usage)
        self._counts_always = self._has_usage and options is not None and bool(options.continuous_usage_stats)
        self._has_ids = bool(body.return_token_ids)
        self._readers: dict[int, ToolReader] = {}
        has_extras = self._writer is not None or self._has_ids or self._counts_always
        self._is_plain = not has_extras and job.tool_use is None
        self._head = {
            "id": job.answer_id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": state.model_name,
            "system_fingerprint": FINGERPRINT,
        }
        self._texts: dict[int, TextEvent] = {}

    def opening(self) -> bytes:
        """Each choice's first chunk."""
        extra = {"prompt_token_ids": self._job.request.prompt_token_ids} if self._has_ids else {}
        delta = {"role": "assistant", "content": self._job.opening}
        return b"".join(self._chunk({"index": i, "delta": delta}, extra) for i in range(self._job.body.n or 1))

    def of(self, index: int, update: RequestUpdate) -> bytes:
        """The chunks of what is new. Mutates: the count of tokens."""
        self._last = update
        data = b""
        for choice in update.choices:
            self._num_generated += len(choice.token_ids)
            data += self._plain(choice) if self._is_plain else self._full(choice)
            if choice.finish_reason is not None:
                data += self._end(choice, update)
        return data

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end."""
        if not self._has_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._usage(), **self._timings()}) + DONE

    def _plain(self, choice: ChoiceUpdate) -> bytes:
        if not choice.text:
            return b""
        found = self._texts.get(choice.index)
        if found is None:
            found = self._texts[choice.index] = TextEvent(
                lambda text: self._content({"index": choice.index, "delta": {"content": text}}, {})
            )
        return found.encode(choice.text)

    def _full(self, choice: ChoiceUpdate) -> bytes:
        if self._job.tool_use is None:
            deltas = [{"content": choice.text}] if choice.token_ids or choice.text else []
        else:
            reader = self._readers.setdefault(choice.index, ToolReader(self._job.tool_use))
            deltas = reader.deltas(choice.text, ends=choice.finish_reason is not None)
        if not deltas and choice.token_ids and (self._writer is not None or self._has_ids):
            deltas = [{"content": ""}]
        if not deltas:
            return b""
        # What belongs to the tokens goes with the first of several events.
        written: dict[str, Any] = {"index": choice.index, "delta": deltas[0]}
        if self._writer is not None:
            written["logprobs"] = self._writer.chat(choice.logprobs or [])
        if self._has_ids:
            written["token_ids"] = choice.token_ids
        others = [self._chunk({"index": choice.index, "delta": delta}, {}) for delta in deltas[1:]]
        return b"".join([self._chunk(written, {}), *others])

    def _end(self, choice: ChoiceUpdate, update: RequestUpdate) -> bytes:
        is_last = update.finished and choice is update.choices[-1] and not self._has_usage
        reader = self._readers.get(choice.index)
        reason = choice.finish_reason if reader is None else reader.finish_reason(choice.finish_reason)
        end = {
            "index": choice.index,
            "delta": {},
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
        }
        return self._chunk(end, self._timings() if is_last else {})

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any]) -> bytes:
        return event(self._content(choice, extra))

    def _content(self, choice: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        content = {**self._head, "choices": [{"logprobs": None, "finish_reason": None, **choice}], **extra}
        if self._has_usage:
            content["usage"] = self._usage() if self._counts_always else None
        return content

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_truncated = self._job.request.num_prompt_tokens, self._job.prompt.num_truncated
        return usage(num_prompt, self._num_generated, self._last.num_cached_tokens, num_truncated)

    def _timings(self) -> dict[str, Any]:
        times = timings(self._job.request.num_prompt_tokens, self._num_generated, self._last)
        return {} if times is None else {"timings": times}
