import msgspec
import pytest

from quire.config import EngineOptions
from quire.engine.process.messages import (
    Abort,
    FromEngine,
    Ping,
    Pong,
    Ready,
    Refused,
    RequestUpdate,
    Start,
    Statistics,
    Submit,
    ToEngine,
    Updates,
)
from quire.errors import (
    EngineError,
    InvalidParameterError,
    ModelNotFoundError,
    QueueFullError,
    QuireError,
    RequestError,
)
from quire.parallel.frames import Failure, FrameReader, frame
from quire.sampling_params import PoolingParams, SamplingParams
from tests.engine.builders import make_engine

SAMPLING = SamplingParams(temperature=0.5, stop=["a", "b"], logit_bias={5: 1.5}, max_tokens=None, seed=2**63)
TO_ENGINE = [
    Start(EngineOptions(model="x", max_model_len=7, hf_overrides={"a": [1]})),
    Submit("r", [1, 2], SAMPLING, None, 3, "client", "salt", 1.5, False),
    Submit("r", [1], None, PoolingParams(pooling="mean")),
    Abort(["a", "b"]),
    Ping(5),
]
FROM_ENGINE = [
    Refused(Failure("model_not_found", "no")),
    Updates([RequestUpdate("r", finished=True, embedding=[0.5])], Statistics(1, 2, 3)),
    Pong(7),
]


def round_trip(message: object, kind: object) -> object:
    (body,) = FrameReader().feed(frame(message))
    return msgspec.msgpack.decode(body, type=kind)


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda item: type(item).__name__)
def test_messages_to_the_engine_arrive_as_they_were(message: ToEngine) -> None:
    assert round_trip(message, ToEngine) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda item: type(item).__name__)
def test_messages_from_the_engine_arrive_as_they_were(message: FromEngine) -> None:
    assert round_trip(message, FromEngine) == message


def test_a_whole_configuration_arrives() -> None:
    engine, _ = make_engine()
    received = round_trip(Ready(engine.config, {"total": 1.0}), FromEngine)
    assert received.config.scheduler == engine.config.scheduler
    assert received.config.options == engine.config.options
    assert received.config.model.eos_token_ids == engine.config.model.eos_token_ids


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 64, 1000])
def test_frames_are_found_however_the_bytes_are_cut(length: int) -> None:
    contents = [[], ["a"], ["b" * 80, "é", ""], ["c"] * 30, []]
    stream = b"".join(frame(Abort(content)) for content in contents)
    reader, bodies = FrameReader(), []
    for start in range(0, len(stream), length):
        bodies += reader.feed(stream[start : start + length])
    assert [msgspec.msgpack.decode(body, type=Abort).request_ids for body in bodies] == contents


def test_a_frame_without_end_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(EngineError, match="at most"):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))


def test_what_is_no_message_is_refused() -> None:
    for body in (b"", b"\xc1", msgspec.msgpack.encode(["nothing", 1]), msgspec.msgpack.encode(["abort", [1]])):
        with pytest.raises(msgspec.MsgspecError):
            msgspec.msgpack.decode(body, type=ToEngine)


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
    revived = Failure.of(error).revive()
    assert type(revived) is kind
    assert revived.message == error.message


def test_an_error_of_an_unknown_kind_is_the_engines() -> None:
    assert type(Failure("from_the_future", "x").revive()) is EngineError
