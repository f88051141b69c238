import msgspec
import pytest

from quire.engine.process.messages import (
    Abort,
)
from quire.errors import (
    EngineError,
    InvalidParameterError,
    ModelNotFoundError,
    QueueFullError,
    QuireError,
    RequestError,
)
from quire.parallel.frames import FrameReader, SentError, frame


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 64, 1000])
def test_frames_are_found_however_the_bytes_are_cut(length: int) -> None:
    contents = [[], ["a"], ["b" * 80, "é", ""], ["c"] * 30, []]
    stream = b"".join(frame(Abort(content)) for content in contents)
    reader, bodies = FrameReader(), []
    for start in range(0, len(stream), length):
        bodies += reader.feed(stream[start : start + length])
    assert [msgspec.msgpack.decode(body, type=Abort).request_ids for body in bodies] == contents


def test_frame_without_end_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(EngineError, match="at most"):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueFullError("full"), QueueFullError),
        (ModelNotFoundError("none"), ModelNotFoundError),
        (InvalidParameterError("n", 3, "less"), RequestError),
        (QuireError("odd"), QuireError),
    ],
)
def test_errors_keep_class_and_message(error: QuireError, kind: type[QuireError]) -> None:
    revived = SentError.of(error).revive()
    assert type(revived) is kind
    assert revived.message == error.message


def test_error_of_an_unknown_kind_is_the_engines() -> None:
    assert type(SentError("from_the_future", "x").revive()) is EngineError
