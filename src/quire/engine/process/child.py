"""Main program of the engine process: `python -m quire.engine.process.child FD`, where FD is its end of a socket pair.

The main thread computes steps, a second thread receives messages, a third sends heartbeats. The process ends when its
parent closes the socket or dies. Knows no HTTP. Next to read: `client.py`, the other end.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from quire.engine.input_processor import PreparedRequest
from quire.engine.process.messages import (
    Abort,
    FromEngine,
    Heartbeat,
    Lines,
    Ready,
    Refused,
    RequestUpdate,
    Start,
    Submit,
    ToEngine,
    Updates,
    Watch,
)
from quire.engine.process.preparation import GrammarThread
from quire.engine.process.statistics import Meter
from quire.engine.recorder import Recorder
from quire.errors import EngineDeadError, EngineError, ModelFileError, QueueTimeoutError, QuireError, escaped
from quire.garbage import without_collections
from quire.logs import follow_environment
from quire.outputs import RequestOutput
from quire.parallel.frames import FrameReader, SentError, frame
from quire.scheduler.request import Request
from quire.types import RequestStatus

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine
    from quire.engine.output_processor import Output

logger = logging.getLogger("quire.engine")
RECEIVE_BYTES = 1 << 18
WARM_UP_TOKENS = 64
"""Enough to fill a kernel's tiles: a large model computes more of them for seconds before a server is ready."""
HEARTBEAT_S = 1.0
LINES_EVERY_S = 0.05
"""Shortest time between two messages of event lines."""


class EngineChannel:
    """The engine's end of the socket. `send` may be called from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages = self._decode(msgspec.msgpack.Decoder(ToEngine))
        self._sending = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """Send a message; blocks while the other end does not read. Raises: ConnectionError if it is gone."""
        data = frame(message)
        with self._sending:
            self._connection.sendall(data)

    def receive(self) -> ToEngine | None:
        """Return the next message; None when the other end is gone."""
        return next(self._messages, None)

    def _decode(self, decoder: "msgspec.msgpack.Decoder[ToEngine]") -> Iterator[ToEngine]:
        reader = FrameReader()
        with contextlib.suppress(OSError):
            while data := self._connection.recv(RECEIVE_BYTES):
                yield from map(decoder.decode, reader.feed(data))


class EngineLoop:
    """Loop that takes messages and runs steps until the other end is gone or the engine is dead."""

    def __init__(self, engine: "LLMEngine", channel: EngineChannel) -> None:
        from quire.engine.driver import EngineDriver  # imports the engine

        self._engine = engine
        self._channel = channel
        self._driver = EngineDriver(engine, self._deliver)
        self._meter = Meter(engine)
        self._grammars = GrammarThread(self._prepare, self._has_room, lambda name: self._post_abort([name]))
        self._recorder: Recorder | None = None
        self._lines_sent_s = 0.0
        self._queued: list[tuple[float, Request]] = []
        """Requests that must be scheduled before a time of the monotonic clock."""

    def run(self) -> None:
        """Raises: EngineDeadError after the requests got it; ConnectionError if the other end is gone."""
        has_ended = threading.Event()
        threading.Thread(target=self._receive, name="quire-receive", daemon=True).start()
        threading.Thread(target=self._beat, args=(has_ended,), name="quire-heartbeat", daemon=True).start()
        try:
            self._driver.run()
        finally:
            has_ended.set()
        self._engine.check_health()

    def _beat(self, has_ended: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while not has_ended.wait(HEARTBEAT_S):
                self._channel.send(Heartbeat())

    def _receive(self) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while (message := self._channel.receive()) is not None:
                    if isinstance(message, Submit):
                        sampling = message.spec.sampling
                        has_grammar = sampling is not None and sampling.structured_outputs is not None
                        (self._grammars.add if has_grammar else self._prepare)(message)
                    elif isinstance(message, Abort):
                        self._post_abort([name for name in message.request_ids if not self._grammars.drop(name)])
                    elif isinstance(message, Watch):
                        self._driver.post(partial(self._watch, message))
        finally:
            # However it ends: an engine without a client must not look alive.
            self._driver.stop()

    def _has_room(self) -> bool:
        """Return whether another request may wait with matchers: as many as can start in one step."""
        return self._engine.input_processor.grammars.num_reserved < self._engine.config.scheduler.max_num_seqs

    def _prepare(self, message: Submit) -> None:
        """Prepare a request, beside the steps."""
        try:
            prepared = self._engine.input_processor.complete(
                message.spec, streams=message.streams, tells_news=True, with_matchers=True
            )
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.error("request %r cannot be prepared", message.spec.request_id, exc_info=error)
                told = f"the request could not be prepared ({type(error).__name__}); the engine's log says more"
                error = EngineError(told)
            self._driver.post(partial(self._send, [_refusal(message.spec.request_id, error)]))
        else:
            self._driver.post(partial(self._submit, prepared, message.queue_timeout_s))

    def _post_abort(self, request_ids: list[str]) -> None:
        self._driver.post(partial(self._engine.abort_request, request_ids))

    def _submit(self, prepared: PreparedRequest, queue_timeout_s: float | None) -> None:
        try:
            self._engine.submit(prepared)
        except EngineDeadError:
            raise
        except QuireError as error:
            self._send([_refusal(prepared.request.request_id, error)])
        else:
            if self._recorder is not None and self._recorder.has_readers:
                self._recorder.meet(prepared.request)
            if queue_timeout_s is not None:
                self._queued.append((time.monotonic() + queue_timeout_s, prepared.request))

    def _watch(self, message: Watch) -> None:
        self._send_lines()  # a header restates what they tell
        timing: dict[str, Any] = {"op_period": message.op_period, "op_interval_s": message.op_interval_s}
        if not message.is_wanted:
            if self._recorder is not None:
                self._recorder.end(message.client_id)
        elif self._recorder is None:
            self._recorder = Recorder(self._engine, reader=message.client_id, with_text=message.with_text, **timing)
        else:
            self._recorder.begin(message.client_id, **timing)
        self._send_lines()

    def _send_lines(self) -> None:
        if self._recorder is not None and self._recorder.has_readers:
            for client_id, data in self._recorder.take_each().items():
                if data:
                    self._channel.send(Lines(client_id, data))

    def _deliver(self, outputs: "list[Output]") -> None:
        self._send([update_of(output) for output in outputs])
        now_s = time.monotonic()
        if self._recorder is None:
            self._engine.events.forget()  # the meter has read them, and this process has no other reader
        elif now_s - self._lines_sent_s >= LINES_EVERY_S or not self._engine.has_unfinished_requests():
            self._lines_sent_s = now_s
            self._send_lines()
            self._engine.events.forget()
        self._queued = [item for item in self._queued if item[1].status is RequestStatus.WAITING]
        overdue = [request.request_id for deadline_s, request in self._queued if deadline_s <= now_s]
        if overdue:
            error = QueueTimeoutError("the request waited too long to be computed: the server is busy, try again later")
            self._engine.abort_request(overdue)
            self._send([_refusal(request_id, error) for request_id in overdue])

    def _send(self, updates: list[RequestUpdate]) -> None:
        statistics = self._meter.take(updates)
        self._channel.send(Updates(updates, statistics, *self._meter.prefixes.take()))


def update_of(output: "Output") -> RequestUpdate:
    """Return the message with an output."""
    if isinstance(output, RequestOutput):
        return RequestUpdate(
            output.request_id,
            output.outputs,
            finished=output.finished,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs,
            metrics=output.metrics,
        )
    failure = None
    if output.finish_reason == "error":
        told = output.error or "the prompt could not be computed"
        failure = SentError(output.error_code or EngineError.code, told)
    elif output.finish_reason == "abort":
        failure = SentError.of(EngineDeadError("the request was aborted"))
    return RequestUpdate(
        output.request_id,
        finished=True,
        num_cached_tokens=output.num_cached_tokens,
        embedding=output.outputs.embedding if failure is None else None,
        failure=failure,
    )


def _refusal(request_id: str, error: QuireError) -> RequestUpdate:
    return RequestUpdate(request_id, finished=True, failure=SentError.of(error))


def serve(channel: EngineChannel, build: Callable[[Start], "LLMEngine"]) -> int:
    """Load the model that the first message names, then run until the end. Returns: the exit code."""
    start = channel.receive()
    if not isinstance(start, Start):
        return 0
    try:
        engine = build(start)
    except QuireError as error:
        channel.send(Refused.of(error))
        return error.exit_code
    warm_up = engine.input_processor.grammars.warm_up
    if start.is_replacement:
        warm_up()  # requests come at once and would compete with it
    channel.send(Ready(engine.config, engine.startup_times))
    if not start.is_replacement:
        # The server loads its own tokenizer first, so no request comes before that.
        threading.Thread(target=warm_up, name="quire-grammars", daemon=True).start()
    try:
        EngineLoop(engine, channel).run()
    except EngineError as error:
        sys.stderr.write(f"error[{error.code}]: {escaped(error.message)}\n")
        return error.exit_code
    finally:
        engine.shutdown()
    return 0


@without_collections()
def _build(start: Start) -> "LLMEngine":
    from quire.runtime.hardware import device_of_share, take_share

    options = start.options
    if options.data_parallel_rank is not None:
        share = options.data_parallel_size, options.data_parallel_rank
        take_share(*share)
        options = replace(options, device=device_of_share(options.device, *share, options.num_ranks))
    from quire.engine.llm_engine import LLMEngine

    engine = LLMEngine.build(options)
    _warm_up(engine)
    return engine


def _warm_up(engine: "LLMEngine") -> None:
    from quire.sampling_params import SamplingParams

    # The first request allocates memory and fails if the model computes NaN: it must not be a user's.
    num_tokens = min(WARM_UP_TOKENS, engine.config.scheduler.max_model_len - 2)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add_request("warm-up", [0] * max(1, num_tokens), params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if (error := output.outputs[0].error) is not None:
                raise ModelFileError(
                    f"{engine.config.options.model} answers no request, its weights may be damaged: {error}"
                )
    engine.reset_prefix_cache()


def main() -> int:
    """Entry point. The parent decides when this process ends: it handles terminal signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow_environment()
    try:
        return serve(EngineChannel(socket.socket(fileno=int(sys.argv[1]))), _build)
    except ConnectionError:
        return 0  # the server and its requests are gone


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The receiving thread may be blocked in the socket: do not join it.
    os._exit(code)
