"""Streams: what belongs to one request, on its way to one reader, which may be slow. Unread items become one.

`AsyncLLM` has streams of outputs, the client of an engine process `RequestStream`s of updates. Knows no HTTP.
Next to read: `client.py`, `../async_llm.py`.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import msgspec

from quire.engine.process.messages import RequestUpdate
from quire.errors import UnreadError
from quire.outputs import CompletionOutput, PositionLogprobs

MAX_UNREAD_BYTES = 80 << 10
"""Of one request, packed: 3,500 log-probabilities, or 8,000 tokens of text."""
MAX_PACKED = 64
"""Packed updates that are merged into one: each has 40 bytes beside its text and numbers."""
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(RequestUpdate).decode


class Item(Protocol):
    """Part of a request's answer; the last one has `finished`."""

    finished: bool


_Item = TypeVar("_Item", bound=Item)


class Stream(Generic[_Item]):
    """Items for one reader in this event loop. Attributes: `has_ended`: the reader has seen the end."""

    def __init__(self, merge: Callable[[_Item, _Item], _Item], ready: asyncio.Event | None = None) -> None:
        """`merge`: an unread item and the next one to one item. `ready`: set when `take` may have something; streams
        of one reader may share it."""
        self.has_ended = False
        self._merge = merge
        self._waiting: _Item | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event() if ready is None else ready

    def put(self, item: _Item) -> None:
        """Offer an item to the reader."""
        self._waiting = item if self._waiting is None else self._merge(self._waiting, item)
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """End the stream: the reader gets the unread items, then the error."""
        self._error = error
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[_Item]:
        """Yield items up to the one with `finished`. Raises: the error that ended the request."""
        while not self.has_ended:
            await self._ready.wait()
            if (item := self.take()) is not None:
                yield item
            else:
                self._ready.clear()

    def take(self) -> _Item | None:
        """Return what the reader has not read, merged; None if there is nothing. Raises: the error that ended the
        request, after the last item. Mutates: `has_ended`."""
        item, self._waiting = self._waiting, None
        if item is not None:
            self.has_ended = item.finished
        elif self._error is not None:
            self.has_ended = True
            raise self._error
        return item


class RequestStream(Stream[RequestUpdate]):
    """The updates of one request. Those that wait for a slow reader are packed, to a tenth of their size.

    A reader that leaves more than `MAX_UNREAD_BYTES` unread gets those and then an error. `is_cut`: this has happened,
    so the engine need not go on. `has_begun`: an update has come.
    """

    def __init__(self, request_id: str, ready: asyncio.Event | None = None) -> None:
        super().__init__(merge, ready)
        self.request_id = request_id
        self.is_cut = self.has_begun = False
        self._packed: list[bytes] = []
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None

    def put(self, update: RequestUpdate) -> None:
        """Offer an update to the reader. Mutates: `is_cut`; after that updates are dropped."""
        if self.is_cut:
            return
        if update.failure is not None:
            return self.fail(update.failure.revive())
        self.has_begun = True
        if self._waiting is None and not self._packed:
            return super().put(update)
        for item in (self._waiting, update):
            if item is not None:
                # They come once, before their reader has anything to read: it takes them at once.
                self._prompt_logprobs, item.prompt_logprobs = item.prompt_logprobs or self._prompt_logprobs, None
                self._packed.append(_pack(item))
        self._waiting = None
        if len(self._packed) > MAX_PACKED:
            self._packed = [bytes(memoryview(_pack(self._unpacked())))]  # a copy without the encoder's spare bytes
        self._ready.set()
        # A finished request costs the engine nothing more: its end is better than an error.
        if sum(map(len, self._packed)) > MAX_UNREAD_BYTES and not update.finished:
            self.is_cut = True
            self.fail(UnreadError(MAX_UNREAD_BYTES))

    def take(self) -> RequestUpdate | None:
        """Return the updates that the reader has not read as one, as `Stream.take`."""
        if self._packed:
            self._waiting, self._packed = self._unpacked(), []
            self._waiting.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return super().take()

    def _unpacked(self) -> RequestUpdate:
        return functools.reduce(merge, map(_unpack, self._packed))


def merge(first: RequestUpdate, second: RequestUpdate) -> RequestUpdate:
    """Return one update with the content of both."""
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
    )


def _merge_choice(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs = second.logprobs if first.logprobs is None else first.logprobs + (second.logprobs or [])
    text, token_ids = first.text + second.text, first.token_ids + second.token_ids
    return replace(second, text=text, token_ids=token_ids, logprobs=logprobs)
