"""Updates of one request on their way to one reader, which may be slow.

Unread updates are merged into one, so that a slow reader loses nothing. Log-probabilities take a hundred times the
memory of text: a reader that leaves more than `MAX_UNREAD_LOGPROBS` unread gets those and then an error. Knows no HTTP.
Next to read: `client.py`.
"""

import asyncio
from collections.abc import AsyncIterator

from quire.engine.process.messages import ChoiceUpdate, RequestUpdate
from quire.errors import QuireError, UnreadError

MAX_UNREAD_LOGPROBS = 4096
"""Of one request: 680 tokens with five alternatives each, about 800 KiB."""


class RequestStream:
    """The updates of one request, for one reader.

    Attributes: `has_ended`: the reader has seen the end; `is_cut`: the reader left too much unread, so the engine
        need not go on.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.has_ended = False
        self.is_cut = False
        self._waiting: RequestUpdate | None = None
        self._num_logprobs = 0
        self._error: QuireError | None = None
        self._ready = asyncio.Event()

    def put(self, update: RequestUpdate) -> None:
        """Offer an update to the reader. Mutates: `is_cut`; after that updates are dropped."""
        if self.is_cut:
            return
        self._waiting = update if self._waiting is None else merge(self._waiting, update)
        self._num_logprobs += sum(len(position) for choice in update.choices for position in choice.logprobs or ())
        # A finished request costs the engine nothing more: its end is better than an error.
        if self._num_logprobs > MAX_UNREAD_LOGPROBS and not update.finished:
            self.is_cut = True
            self.fail(UnreadError(MAX_UNREAD_LOGPROBS))
        self._ready.set()

    def fail(self, error: QuireError) -> None:
        """End the stream: the reader gets the unread updates, then the error."""
        self._error = error
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[RequestUpdate]:
        """Yield updates up to the one with `finished`. Raises: the error that ended the request."""
        while not self.has_ended:
            await self._ready.wait()
            update, self._waiting, self._num_logprobs = self._waiting, None, 0
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
