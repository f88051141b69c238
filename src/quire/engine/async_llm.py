"""`AsyncLLM`: the engine for asyncio programs. One thread runs steps; coroutines wait for outputs.

Only the engine's thread touches the engine (`driver.py`). Coroutines post commands to it and get outputs through an
`OutputStream`. Knows no HTTP. Next to read: `driver.py`.
"""

import asyncio
import atexit
import threading
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from quire.engine.adapters import LoRARequest
from quire.engine.chat import Conversation, chat_options, dialogue_of
from quire.engine.driver import EngineDriver
from quire.engine.handle import EngineHandle
from quire.engine.input_processor import PreparedRequest
from quire.engine.llm_engine import LLMEngine
from quire.engine.output_processor import Output
from quire.engine.process.stream import Stream
from quire.engine.scoring import Scoring, make_pairs, vector_of
from quire.errors import EngineDeadError, QuireError, RequestError
from quire.outputs import PoolingRequestOutput, RequestOutput, ScoringOutput, ScoringRequestOutput
from quire.sampling_params import PoolingParams, SamplingParams

EXIT_TIMEOUT_S = 10.0
"""Longest wait at the end of the process for the running step."""


class OutputStream(Stream[Output]):
    """Outputs of one request on their way from the engine's thread to one coroutine.

    Outputs are cumulative, so a newer one replaces an older one that was not read.
    """

    def __init__(self) -> None:
        super().__init__(lambda before, now: now)
        self._loop = asyncio.get_running_loop()

    def post(self, item: Output | BaseException) -> bool:
        """Offer an output, or the error that ends the request, from any thread. Returns False if the reader's event
        loop is closed."""
        try:
            if isinstance(item, BaseException):
                self._loop.call_soon_threadsafe(self.fail, item)
            else:
                self._loop.call_soon_threadsafe(self.put, item)
        except RuntimeError:
            return False
        return True


class AsyncLLM(EngineHandle):
    """A model that answers many callers at once, from any event loop.

    Keyword arguments are the fields of `EngineOptions`. Each accepted request ends in exactly one terminal event:
    an output with `finished`, or an exception if the engine died. Leaving a generator early, or cancelling its task,
    aborts it.
    """

    def _attach(self, engine: LLMEngine) -> None:
        super()._attach(engine)
        self._streams: dict[str, OutputStream] = {}
        self._driver = EngineDriver(engine, self._deliver)
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_the_process)

    # --- Requests -------------------------------------------------------------------------

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
        deadline_s: float | None = None,
        streams: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield all text so far, each time there is more; the last output has `finished`.

        With `streams=False` only the last one. Outputs that came while the caller was busy are merged.
        `deadline_s`: seconds after which an answer that is not complete ends, with `finish_reason` "abort".
        Raises: RequestError, CapacityError, EngineDeadError.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        identity: dict[str, Any] = {
            "priority": priority,
            "client_id": client_id,
            "cache_salt": cache_salt,
            "lora_request": lora_request,
            "deadline_s": deadline_s,
        }
        return self._follow(prompt, params, SamplingParams, request_id, streams=streams, **identity)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
        deadline_s: float | None = None,
        streams: bool = True,
        **choices: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answer of a conversation so far, as `generate` does; completions have a `message`.

        `choices`: the other keyword arguments of `LLM.chat`. Raises: ChatTemplateError and what `generate` raises.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        dialogue, options = dialogue_of(self.llm_engine), chat_options(**choices)
        chat = await asyncio.to_thread(Conversation.prepare, dialogue, messages, tools, options, params)
        identity: dict[str, Any] = {"priority": priority, "client_id": client_id, "cache_salt": cache_salt}
        identity |= {"lora_request": lora_request, "deadline_s": deadline_s}
        async with aclosing(self.generate(chat.prompt, chat.params, request_id, streams=streams, **identity)) as found:
            async for output in found:
                yield chat.read(output)

    def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield one output: the prompt's vector. Raises: RequestError, CapacityError, EngineDeadError."""
        params = pooling_params or self.llm_engine.input_processor.default_pooling_params
        identity: dict[str, Any] = {"priority": priority, "client_id": client_id, "cache_salt": cache_salt}
        identity["lora_request"] = lora_request
        return self._follow(prompt, params, PoolingParams, request_id, streams=False, **identity)

    async def score(self, data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[ScoringRequestOutput]:
        """Score pairs of texts as `LLM.score` does. Raises: RequestError, CapacityError, EngineDeadError."""
        pairs, model, tokenizer = make_pairs(data_1, data_2), self.llm_engine.config.model, self.get_tokenizer()
        scoring = await asyncio.to_thread(Scoring, model, tokenizer, pairs)

        async def vector(prompt: Any) -> list[float]:
            return vector_of(await anext(self.encode(prompt, scoring.params)))

        vectors = await asyncio.gather(*map(vector, scoring.prompts))
        return [ScoringRequestOutput(ScoringOutput(score)) for score in scoring.scores(vectors)]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their generators yield a final output with `finish_reason` "abort". Unknown ids are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        if self.is_running:
            with suppress(EngineDeadError):  # it may end between the two lines
                await asyncio.wrap_future(self._driver.call(lambda: self.llm_engine.abort_request(request_ids)))

    async def _follow(
        self,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        kind: type[SamplingParams] | type[PoolingParams],
        request_id: str | None,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """Add a request of this kind and yield its outputs; abort it if the caller leaves early."""
        if not isinstance(params, kind):
            name = "sampling_params" if kind is SamplingParams else "pooling_params"
            raise RequestError(f"{name} must be {kind.__name__}, got {type(params).__name__}")
        self._check_running()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        # Tokenising a long prompt takes milliseconds, so it happens off the event loop.
        prepared = await asyncio.to_thread(
            self.llm_engine.input_processor.prepare, request_id, prompt, params, **options
        )
        stream = OutputStream()
        self._driver.post(lambda: self._add(prepared, stream))
        try:
            async for output in stream:
                yield output
        finally:
            if not stream.has_ended:
                with suppress(EngineDeadError):
                    self._driver.post(lambda: self._leave(request_id, stream))

    # --- State ----------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True while requests are accepted."""
        return not self._driver.is_stopping and not self.llm_engine.errored and self._thread.is_alive()

    @property
    def errored(self) -> bool:
        """True if the engine is dead."""
        return self.llm_engine.errored

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Return the error that ended the engine."""
        return self.llm_engine.dead_error

    async def check_health(self) -> None:
        """Raises: EngineDeadError, with the cause chained, if the engine is dead or was shut down."""
        self._check_running()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns False, and does nothing, while requests hold blocks."""
        self._check_running()
        return await asyncio.wrap_future(self._driver.call(self.llm_engine.reset_prefix_cache))

    def shutdown(self) -> None:
        """End all requests (their generators yield "abort"), stop the thread and free the model's memory."""
        self._driver.stop()
        atexit.unregister(self._end_with_the_process)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _end_with_the_process(self) -> None:
        # Python unwinds threads at exit; a thread inside native code would abort the process.
        if self._thread.is_alive():  # not in a fork, where a dead thread may hold the locks
            self._driver.stop()
            self._thread.join(EXIT_TIMEOUT_S)

    def _check_running(self) -> None:
        if self.llm_engine.errored:
            raise self.llm_engine.death()
        if self._driver.is_stopping or not self._thread.is_alive():
            raise EngineDeadError("the engine was shut down: make a new one")

    # --- The engine thread ----------------------------------------------------------------

    def _add(self, prepared: PreparedRequest, stream: OutputStream) -> None:
        if ended := self.llm_engine.take_ended():
            # Before the request is added: an aborted one may have had the same id.
            self._deliver(ended)
        try:
            self.llm_engine.submit(prepared)
        except Exception as error:
            stream.post(error)
            if not isinstance(error, QuireError):
                raise
        else:
            self._streams[prepared.request.request_id] = stream

    def _leave(self, request_id: str, stream: OutputStream) -> None:
        # The request may have been refused, or the id may belong to a later one.
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self.llm_engine.abort_request(request_id)

    def _run(self) -> None:
        try:
            self._driver.run()
        except Exception as error:
            self._deliver(self.llm_engine.fail(error))
        finally:
            try:
                self._deliver(self.llm_engine.shutdown())
            finally:
                self._driver.close()
                self._fail_remaining()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            if self.llm_engine.errored and _failed(output):
                stream.post(self.llm_engine.death())
            elif not stream.post(output) and not output.finished:
                del self._streams[output.request_id]
                self.llm_engine.abort_request(output.request_id)

    def _fail_remaining(self) -> None:
        """End the streams whose outputs were lost in a step that raised while it made them."""
        for stream in self._streams.values():
            stream.post(
                self.llm_engine.death() if self.llm_engine.errored else EngineDeadError("the engine was shut down")
            )
        self._streams.clear()


def _failed(output: Output) -> bool:
    if isinstance(output, PoolingRequestOutput):
        return output.finish_reason == "error"
    return any(completion.finish_reason == "error" for completion in output.outputs)
