"""`AsyncLLM`: the engine for asyncio programs and servers. One thread runs steps; coroutines wait for outputs.

Only the engine thread touches the engine. Coroutines leave commands in an inbox and get outputs through an
`OutputStream`, which keeps the latest output only: outputs are cumulative, so a slow reader loses nothing and costs
no memory. Knows no HTTP. Next to read: `llm_engine.py`.
"""

import asyncio
import atexit
import threading
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from quire.engine.input_processor import PreparedRequest
from quire.engine.llm_engine import LLMEngine
from quire.engine.output_processor import Output
from quire.engine.output_stream import OutputStream, wake_all
from quire.errors import EngineDeadError, QuireError, RequestError
from quire.outputs import PoolingRequestOutput, RequestOutput
from quire.sampling_params import PoolingParams, SamplingParams
from quire.text.tokenizer import Tokenizer

EXIT_TIMEOUT_S = 10.0
"""How long the end of the process waits for the step that is running."""
_Result = TypeVar("_Result")
_Params = TypeVar("_Params", SamplingParams, PoolingParams)


class AsyncLLM:
    """A model that answers many callers at once, from any event loop.

    Keyword arguments are the fields of `EngineOptions`. Each accepted request ends in exactly one terminal event:
    an output with `finished`, or an exception if the engine died. Leaving a generator early, or cancelling its task,
    aborts it.
    """

    def __init__(self, model: str = "smollm2", **kwargs: Any) -> None:
        """Loads the model; takes seconds. Raises: ConfigError, ModelError, CapacityError."""
        self._attach(LLMEngine.from_options(model, **kwargs))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """An `AsyncLLM` around an engine that exists already and that nobody else drives."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._streams: dict[str, OutputStream] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_closing = False
        self._is_closed = False
        self._wakeup = threading.Condition()
        engine.watch(lambda: bool(self._inbox) or self._is_closing)
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_the_process)

    # --- Requests -------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        streams: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield all text so far, each time there is more; the last output has `finished`.

        With `streams=False` only the last one. Outputs that came while the caller was busy are merged.
        Raises: RequestError, CapacityError, EngineDeadError.
        """
        default = self._engine.input_processor.default_sampling_params
        params = _checked("sampling_params", default if sampling_params is None else sampling_params, SamplingParams)
        identity = {"priority": priority, "client_id": client_id, "cache_salt": cache_salt}
        async with aclosing(self._follow(prompt, params, request_id, streams=streams, **identity)) as outputs:
            async for output in outputs:
                assert isinstance(output, RequestOutput)
                yield output

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield one output: the prompt's vector. Raises: RequestError, CapacityError, EngineDeadError."""
        params = PoolingParams() if pooling_params is None else pooling_params
        params = _checked("pooling_params", params, PoolingParams)
        identity = {"priority": priority, "client_id": client_id, "cache_salt": cache_salt}
        async with aclosing(self._follow(prompt, params, request_id, streams=False, **identity)) as outputs:
            async for output in outputs:
                assert isinstance(output, PoolingRequestOutput)
                yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their generators yield a final output with `finish_reason` "abort". Unknown ids are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if self.is_running:
            with suppress(EngineDeadError):  # it may end between the two lines
                await asyncio.wrap_future(self._call(lambda: self._engine.abort_request(request_ids)))

    async def _follow(
        self, prompt: Any, params: SamplingParams | PoolingParams, request_id: str | None, **options: Any
    ) -> AsyncGenerator[Output, None]:
        self._check_running()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        # Tokenising a long prompt takes milliseconds, so it happens off the event loop.
        prepared = await asyncio.to_thread(self._engine.input_processor.prepare, request_id, prompt, params, **options)
        stream = OutputStream(asyncio.get_running_loop())
        self._post(lambda: self._add(prepared, stream))
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            if not stream.has_ended:
                with suppress(EngineDeadError):
                    self._post(lambda: self._leave(request_id, stream))

    # --- State ----------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return not self._is_closing and not self._engine.errored and self._thread.is_alive()

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        return self._engine.errored

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What the engine died of."""
        return self._engine.dead_error

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, for reading `config` and `events`; only its own thread may call its methods."""
        return self._engine

    async def check_health(self) -> None:
        """Raises: EngineDeadError, with the cause chained, if the engine is dead or was shut down."""
        self._check_running()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self._engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return self._engine.input_processor.default_sampling_params

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests hold blocks."""
        self._check_running()
        return await asyncio.wrap_future(self._call(self._engine.reset_prefix_cache))

    def shutdown(self) -> None:
        """End all requests (their generators yield "abort"), stop the thread and free the model's memory."""
        self._ask_to_end()
        atexit.unregister(self._end_with_the_process)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _ask_to_end(self) -> None:
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()

    def _end_with_the_process(self) -> None:
        # Python ends threads by unwinding them: one that is inside of native code would bring the process down.
        if self._thread.is_alive():  # not in a fork, whose locks may be held by nobody
            self._ask_to_end()
            self._thread.join(EXIT_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _check_running(self) -> None:
        if self._engine.errored:
            raise self._engine.death()
        if self._is_closing or not self._thread.is_alive():
            raise EngineDeadError("the engine was shut down: make a new one")

    # --- The engine thread ----------------------------------------------------------------

    def _post(self, command: Callable[[], None]) -> None:
        with self._wakeup:
            if self._is_closed:
                self._check_running()
            self._inbox.append(command)
            self._wakeup.notify()

    def _call(self, function: Callable[[], _Result]) -> "Future[_Result]":
        """Have the engine thread call a function between steps."""
        future: Future[_Result] = Future()

        def command() -> None:
            # The caller's task may be cancelled; what it asked for happens, but a cancelled future takes no result.
            is_wanted = future.set_running_or_notify_cancel()
            try:
                result = function()
            except Exception as error:
                if is_wanted:
                    future.set_exception(error)
            else:
                if is_wanted:
                    future.set_result(result)

        self._post(command)
        return future

    def _add(self, prepared: PreparedRequest, stream: OutputStream) -> None:
        if ended := self._engine.take_ended():
            # Now: the id of one that was aborted may be this request's, and its stream this one from here on.
            self._deliver(ended)
        try:
            self._engine.submit(prepared)
        except Exception as error:
            stream.fail(error)
            wake_all([stream])
            if not isinstance(error, QuireError):
                raise
        else:
            self._streams[prepared.request.request_id] = stream

    def _leave(self, request_id: str, stream: OutputStream) -> None:
        # The id may have been refused, or may belong to a later request by now.
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.abort_request(request_id)

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_unfinished_requests():
                    self._deliver(self._engine.step())
        except Exception as error:
            self._deliver(self._engine.fail(error))
        finally:
            self._close()

    def _take_commands(self) -> bool:
        """Run the commands that are there; sleep while there is nothing to do. False: the thread must end."""
        engine = self._engine
        with self._wakeup:
            self._wakeup.wait_for(
                lambda: self._inbox or self._is_closing or engine.errored or engine.has_unfinished_requests()
            )
            num_commands = len(self._inbox)
        for _ in range(num_commands):
            # One by one: if a command fails, those behind it stay and are answered by `_close`.
            self._inbox.popleft()()
        return not self._is_closing and not engine.errored

    def _deliver(self, outputs: list[Output]) -> None:
        touched = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            touched.append(stream)
            if self._engine.errored and _failed(output):
                stream.fail(self._engine.death())
            else:
                stream.put(output)
            if output.finished:
                del self._streams[output.request_id]
        unreachable = set(wake_all(touched))
        for request_id in [name for name, stream in self._streams.items() if stream in unreachable]:
            del self._streams[request_id]
            self._engine.abort_request(request_id)

    def _close(self) -> None:
        try:
            self._deliver(self._engine.shutdown())
        finally:
            with self._wakeup:
                self._is_closed = self._is_closing = True
                commands, self._inbox = self._inbox, deque()
            # Requests that came too late are refused by the engine; nobody is left waiting.
            for command in commands:
                with suppress(Exception):  # it has told its own caller
                    command()
            self._fail_remaining()

    def _fail_remaining(self) -> None:
        """End the streams whose outputs were lost in a step that broke off while it made them."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(self._engine.death() if self._engine.errored else EngineDeadError("the engine was shut down"))
        wake_all(streams)


def _checked(name: str, params: Any, kind: type[_Params]) -> _Params:
    if not isinstance(params, kind):
        raise RequestError(f"{name} must be {kind.__name__}, got {type(params).__name__}")
    return params


def _failed(output: Output) -> bool:
    if isinstance(output, PoolingRequestOutput):
        return output.finish_reason == "error"
    return any(completion.finish_reason == "error" for completion in output.outputs)
