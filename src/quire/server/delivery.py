"""Whether a client takes its answers: who does not is cut off, with what waits for it here and in the kernel.

Two rules. An answer that is still being made may wait for its reader for a minute: people stop streams, and machines
sleep. One that is finished must be taken steadily: nothing but its reader keeps it here. Knows no HTTP.
Next to read: `connection.py`.
"""

import asyncio
import contextlib
import socket
import struct
import sys

MIN_TAKEN_BYTES = 4 << 10
"""Of a finished answer, in each `finished_s`: some 270 bytes a second, which every line does that serves anybody."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on, for no time: closing sends a reset and frees what was not sent."""
_TCP_INFO_BYTES = 256
_ACKNOWLEDGED = struct.Struct("=120xQ")
"""`tcpi_bytes_acked` of Linux' `struct tcp_info`."""


class Delivery:
    """The answers of one connection. Units: seconds of the event loop's clock."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        unfinished_s: float,
        finished_s: float,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._unfinished_s = unfinished_s
        self._finished_s = finished_s
        self._paused: asyncio.TimerHandle | None = None
        self._watching: asyncio.TimerHandle | None = None

    def pause(self) -> None:
        """More is written than the client has read."""
        if self._paused is None:
            self._paused = self._loop.call_later(self._unfinished_s, self._cut)

    def resume(self) -> None:
        """The client has caught up."""
        if self._paused is not None:
            self._paused.cancel()
            self._paused = None

    def finish(self) -> None:
        """An answer is written as a whole, but perhaps not taken."""
        num_waiting = self._transport.get_write_buffer_size()
        if num_waiting:
            self.resume()
            if self._watching is None:
                self._watch(num_waiting)

    def ask(self) -> None:
        """The client asks for something: who has taken all before owes nothing."""
        if self._watching is not None and not self._transport.get_write_buffer_size():
            self._watching.cancel()
            self._watching = None

    def stop(self) -> None:
        """The connection is over."""
        for timer in (self._paused, self._watching):
            if timer is not None:
                timer.cancel()
        self._paused = self._watching = None

    def _watch(self, num_waiting: int) -> None:
        wanted = self._num_taken() + min(MIN_TAKEN_BYTES, num_waiting)
        self._watching = self._loop.call_later(self._finished_s, self._look, wanted)

    def _look(self, wanted: int) -> None:
        self._watching = None
        num_waiting = self._transport.get_write_buffer_size()
        if not num_waiting:
            return  # the kernel has the rest, or it is taken
        if self._num_taken() < wanted:
            self._cut()
        else:
            self._watch(num_waiting)

    def _num_taken(self) -> int:
        """Bytes that the client's machine has acknowledged; where the system does not count them, what left here."""
        connected = self._transport.get_extra_info("socket")
        if sys.platform == "linux" and connected is not None:
            with contextlib.suppress(OSError, struct.error):
                info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                return int(_ACKNOWLEDGED.unpack_from(info)[0])
        return -self._transport.get_write_buffer_size()

    def _cut(self) -> None:
        self.resume()
        if self._transport.get_write_buffer_size():
            # What the kernel still holds for a reader who does not read would stay there for minutes.
            connected = self._transport.get_extra_info("socket")
            if connected is not None:
                with contextlib.suppress(OSError):
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._transport.abort()
