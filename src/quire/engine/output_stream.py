"""From the engine's thread to one waiting coroutine: the latest output, or an error.

Next to read: `async_llm.py`.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from quire.engine.output_processor import Output


class OutputStream:
    """Outputs of one request on their way to the event loop that asked for them.

    Holds one output at most: they are cumulative, so a newer one replaces an older one that was not read.
    `put` and `fail` are the engine thread's, the rest the loop's.
    Attributes: `has_ended`: the reader has seen the end, so that nothing is left to abort.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.has_ended = False
        self._latest: deque[Output] = deque(maxlen=1)
        self._error: BaseException | None = None
        self._ready = asyncio.Event()

    def put(self, output: Output) -> None:
        """Offer an output; `wake` must follow."""
        self._latest.append(output)

    def fail(self, error: BaseException) -> None:
        """End with an error; `wake` must follow."""
        self._error = error

    def wake(self) -> None:
        """Something was put: let the coroutine look."""
        self._ready.set()

    async def next(self) -> Output:
        """Wait for the next output. Raises: the error that ended the request."""
        while True:
            self._ready.clear()
            if self._latest:
                output = self._latest.popleft()
                self.has_ended = output.finished
                return output
            if self._error is not None:
                self.has_ended = True
                raise self._error
            await self._ready.wait()


def wake_all(streams: Iterable[OutputStream]) -> list[OutputStream]:
    """Wake many readers, with one call per event loop: waking a loop costs a system call.

    Returns: those whose loop is closed.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[OutputStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    unreachable = []
    for loop, members in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_each, members)
        except RuntimeError:
            unreachable += members
    return unreachable


def _wake_each(streams: list[OutputStream]) -> None:
    for stream in streams:
        stream.wake()
