"""The updates of one request on their way to a reader who may be slow, or not read at all.

Text that is not read yet is merged into one update: it is small, and nothing of it is lost. Log-probabilities are two
hundred times as large, so updates with them wait as bytes, a fifth of their size as objects, and only so many: a reader
who leaves more than `MAX_UNREAD_BYTES` gets what is there and then an error. Knows no HTTP.
Next to read: `client.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec
from msgspec import structs

from quire.engine.process.messages import ChoiceUpdate, RequestUpdate
from quire.errors import QuireError, UnreadError
from quire.outputs import Logprob, PositionLogprobs

MAX_UNREAD_BYTES = 96 << 10
"""Of updates with log-probabilities, packed: some 600 tokens with five alternatives each."""
PIECE_BYTES = 4 << 10
"""So much of them is unpacked at once: as objects and as JSON it is several times as large."""


class RequestStream:
    """The updates of one request, for one reader."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.has_ended = False
        self.is_cut = False
        """The reader left too much unread: the engine need not go on."""
        self._waiting: RequestUpdate | None = None
        self._packed = _Packed(request_id)
        self._error: QuireError | None = None
        self._ready = asyncio.Event()

    def put(self, update: RequestUpdate) -> None:
        """Offer an update to the reader. Mutates: `is_cut`; after that updates are dropped."""
        if self.is_cut:
            return
        if self._waiting is None and not self._packed.num_bytes:
            self._waiting = update
        elif self._packed.num_bytes or _is_large(update) or (self._waiting is not None and _is_large(self._waiting)):
            self._packed.append(update)
            # The end costs the engine nothing more, and is better than an error.
            if self._packed.num_bytes > MAX_UNREAD_BYTES and not update.finished:
                self.is_cut = True
                self.fail(UnreadError(MAX_UNREAD_BYTES))
        else:
            assert self._waiting is not None
            self._waiting = merge(self._waiting, update)
        self._ready.set()

    def fail(self, error: QuireError) -> None:
        """No update comes any more: what waits is still read, then the error."""
        self._error = error
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        """Updates up to the one with `finished`. Raises: the error that ended the request."""
        while not self.has_ended:
            await self._ready.wait()
            update, self._waiting = self._waiting, None
            if update is None:
                update = self._packed.take(PIECE_BYTES)
            if update is not None:
                if update.failure is not None:
                    self.has_ended = True
                    raise update.failure.revive()
                self.has_ended = update.finished
                yield update
            elif self._error is not None:
                self.has_ended = True
                raise self._error
            else:
                self._ready.clear()


class _Packed:
    """Updates as MessagePack, first in first out."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.num_bytes = 0
        self._bytes = bytearray()
        self._lens: deque[int] = deque()

    def append(self, update: RequestUpdate) -> None:
        logprobs = [[_rows(position) for position in choice.logprobs or ()] for choice in update.choices]
        rest = [structs.replace(choice, logprobs=None) for choice in update.choices]
        data = _encode((structs.replace(update, request_id="", choices=rest), logprobs))
        self._bytes += data
        self._lens.append(len(data))
        self.num_bytes += len(data)

    def take(self, num_bytes: int) -> RequestUpdate | None:
        """The first ones, merged, of so many bytes together or little more. Mutates: they are gone."""
        found: RequestUpdate | None = None
        start = 0
        while self._lens and start < num_bytes:
            end = start + self._lens.popleft()
            update, logprobs = _decode(self._bytes[start:end])
            update.request_id = self._request_id
            for choice, positions in zip(update.choices, logprobs, strict=True):
                choice.logprobs = [_position(rows) for rows in positions] or None
            found = update if found is None else merge(found, update)
            start = end
        del self._bytes[:start]
        self.num_bytes -= start
        return found


_Row = tuple[int, float, int, str]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[RequestUpdate, list[list[list[_Row]]]]).decode


def _rows(position: PositionLogprobs) -> list[_Row]:
    """Without the names of the fields, which are most of the bytes."""
    return [(token_id, item.logprob, item.rank, item.decoded_token) for token_id, item in position.items()]


def _position(rows: list[_Row]) -> PositionLogprobs:
    return {token_id: Logprob(logprob, rank, text) for token_id, logprob, rank, text in rows}


def _is_large(update: RequestUpdate) -> bool:
    return any(choice.logprobs for choice in update.choices)


def merge(first: RequestUpdate, second: RequestUpdate) -> RequestUpdate:
    """One update that says what two said."""
    choices = {choice.index: choice for choice in first.choices}
    for choice in second.choices:
        before = choices.get(choice.index)
        choices[choice.index] = choice if before is None else _merge_choice(before, choice)
    return RequestUpdate(
        first.request_id,
        list(choices.values()),
        finished=second.finished,
        num_cached_tokens=second.num_cached_tokens,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        embedding=second.embedding,
        metrics=second.metrics,
        failure=second.failure,
    )


def _merge_choice(first: ChoiceUpdate, second: ChoiceUpdate) -> ChoiceUpdate:
    logprobs = second.logprobs if first.logprobs is None else first.logprobs + (second.logprobs or [])
    return ChoiceUpdate(
        first.index,
        first.text + second.text,
        first.token_ids + second.token_ids,
        logprobs,
        second.finish_reason,
        second.stop_reason,
        second.error,
        second.error_code,
    )
