"""Frames: how messages travel between the processes of an engine. A frame is its length in four bytes and MessagePack.

A message is a typed struct: data of another type is refused, and no received data can run code.
Next to read: `engine/process/messages.py` and `rank_messages.py` for the messages.
"""

import struct
from collections.abc import Iterator

import msgspec

from quire import errors
from quire.errors import EngineError, InvalidParameterError, QuireError, RequestError

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")
_CLASSES = {
    kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuireError)
}
# Field and value are not sent: only the message is shown.
_CLASSES[InvalidParameterError.code] = RequestError


class SentError(msgspec.Struct, array_like=True):
    """Code and message of a `QuireError`."""

    code: str
    message: str

    @classmethod
    def of(cls, error: QuireError) -> "SentError":
        """Return the code and message of an error."""
        return cls(error.code, error.message)

    def revive(self) -> QuireError:
        """Return an error of the class with this code."""
        kind = _CLASSES.get(self.code, EngineError)
        error = kind.__new__(kind)
        Exception.__init__(error, self.message)
        return error


def frame(message: msgspec.Struct) -> bytes:
    """A message ready to be sent."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splitter of a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that `data` completes. Raises: EngineError for a frame above `MAX_FRAME_BYTES`."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise EngineError(f"a message of {length} bytes between processes: at most {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            yield bytes(buffer[start + _LENGTH.size : end])
            start = end
        del buffer[:start]
