"""`Engines`: the engines of one model, each a process of its own, and the front end that they share.

A request goes to the engine that has most of its prompt cached, unless more work waits there: `placement.py`. When an
engine dies, its requests end with an error, and it gets none until it is replaced. With one engine nothing is computed
for placement. Knows no HTTP beyond the errors. Next to read: `supervisor.py`, `front_end.py`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from quire.byte_sizes import format_bytes
from quire.config import EngineConfig, EngineOptions
from quire.engine.process.client import EngineClient
from quire.engine.process.messages import Statistics, Submit
from quire.engine.process.prefixes import prompt_digests, split
from quire.engine.process.stream import RequestStream
from quire.engine.tokenizer_source import read_chat_template
from quire.errors import QuireError
from quire.memory_plan import kv_bytes
from quire.server.front_end import FrontEnd
from quire.server.placement import Prompt, choose
from quire.server.supervisor import MAX_SILENT_S, EngineState, Supervisor, not_ready
from quire.types import RequestSpec

LOGGER = logging.getLogger("quire.server")
LONG_PROMPT = 2048
"""Tokens from which on a prompt is hashed in a thread: 2,048 take 0.1 ms, and other streams would wait."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A request at an engine. `num_queued`: tokens of its prompt that were not cached there."""

    stream: RequestStream
    prompt: Prompt
    num_queued: int


class EngineLoad:
    """The requests that this server has sent to one engine, for placement."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._placed: list[_Placed] = []
        self._expected: Counter[bytes] = Counter()
        """Blocks that it computes now."""

    @property
    def num_requests(self) -> int:
        """Requests that it has; each of several completions counts once it runs."""
        statistics = self.client.statistics
        return max(self.client.num_requests, statistics.num_running + statistics.num_waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait there, of requests without an answer so far."""
        return sum(item.num_queued for item in self._placed if not item.stream.has_begun)

    def num_hit_tokens(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt's beginning that it has cached, or computes now for another request."""
        cached, num_blocks = self.client.prefixes.digests, 0
        for digest in prompt.digests:
            if digest not in cached and digest not in self._expected:
                break
            num_blocks += 1
        return num_blocks * prompt.block_size

    def add(self, stream: RequestStream, prompt: Prompt) -> None:
        """Count a request until it has ended."""
        self._placed.append(_Placed(stream, prompt, prompt.num_tokens - self.num_hit_tokens(prompt)))
        self._expected.update(prompt.digests)

    def drop_ended(self) -> None:
        """Count requests no longer that have ended. Blocks that they computed are announced by now."""
        running: list[_Placed] = []
        for item in self._placed:
            if self.client.is_running(item.stream):
                running.append(item)
                continue
            self._expected.subtract(item.prompt.digests)
            for digest in item.prompt.digests:
                if not self._expected[digest]:
                    del self._expected[digest]
        self._placed = running


class Engines:
    """The engines of one model. It calls `on_stop` with the reason when it cannot go on with all of them."""

    def __init__(self, options: EngineOptions, on_stop: Callable[[QuireError], None]) -> None:
        """Raises: ConfigError if the chat template cannot be read or does not parse."""
        self._chat_template = read_chat_template(options.chat_template)
        self._front_end: FrontEnd | None = None
        self._loading = asyncio.Lock()
        num_engines = options.data_parallel_size
        self.supervisors: Sequence[Supervisor] = [
            Supervisor(
                share_of(options, rank), on_stop, self._load_front_end, f"engine {rank}: " if num_engines > 1 else ""
            )
            for rank in range(num_engines)
        ]
        self._options = options
        self._loads: dict[Supervisor, EngineLoad] = {}
        self._num_placed = 0

    @property
    def options(self) -> EngineOptions:
        """Options of all engines together."""
        return self._options

    @options.setter
    def options(self, options: EngineOptions) -> None:
        self._options = options
        for rank, supervisor in enumerate(self.supervisors):
            supervisor.options = share_of(options, rank)

    # --- State ----------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Return the best state of an engine: one that is ready takes the requests."""
        states = [supervisor.state for supervisor in self.supervisors]
        order = (EngineState.READY, EngineState.RESTARTING, EngineState.STARTING)
        return next((state for state in order if state in states), states[0])

    @property
    def is_ready(self) -> bool:
        """True if an engine takes requests."""
        return self.state is EngineState.READY

    @property
    def is_restarting(self) -> bool:
        """True while no engine takes requests, and one that died is replaced."""
        return self.state is EngineState.RESTARTING

    @property
    def is_asleep(self) -> bool:
        """True if the engines were ended and wait to be started again."""
        return self.state is EngineState.ASLEEP

    @property
    def client(self) -> EngineClient:
        """Return the first engine that takes requests. Raises: ApiError 503 while there is none."""
        ready = (supervisor for supervisor in self.supervisors if supervisor.is_ready)
        return next(ready, self.supervisors[0]).client

    @property
    def statistics(self) -> list[Statistics]:
        """Return the last report of each engine; all zeros for one that takes no requests."""
        return [
            supervisor.client.statistics if supervisor.is_ready else Statistics() for supervisor in self.supervisors
        ]

    @property
    def has_front_end(self) -> bool:
        """True once an engine was loaded."""
        return self._front_end is not None

    @property
    def front_end(self) -> FrontEnd:
        """Return the model's tokenizer and limits. Raises: ApiError 503 before the first start."""
        if self._front_end is None:
            raise not_ready("the model is being loaded")
        return self._front_end

    def stall_s(self) -> float:
        """Return the longest time for which an engine with requests has ended no step."""
        return max(supervisor.stall_s() for supervisor in self.supervisors)

    def silence_s(self) -> float:
        """Return the seconds since the last message of the engine that is silent longest. Raises: as `client`."""
        _ = self.client
        return max(supervisor.silence_s() for supervisor in self.supervisors if supervisor.is_ready)

    def tell_watchers(self, client_id: str, make_line: Callable[[], bytes]) -> None:
        """Send a line to the watchers of any engine's events that are this client, if there are some."""
        for supervisor in self.supervisors:
            supervisor.tell_watchers(client_id, make_line)

    # --- Life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all engines at once. Each takes requests as soon as it is ready.

        Raises: the first error of loading the model, when no further engine is being started; EngineDeadError if a
        process ended meanwhile.
        """
        starting = [asyncio.create_task(supervisor.start()) for supervisor in self.supervisors]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)

    async def _load_front_end(self, config: EngineConfig) -> None:
        async with self._loading:
            if self._front_end is None:
                each = "" if len(self.supervisors) == 1 else f" in each of {len(self.supervisors)} engines"
                LOGGER.info("loaded %s: %s of KV cache%s", self.options.model, format_bytes(kv_bytes(config)), each)
                front_end = await asyncio.to_thread(FrontEnd.load, config, self._chat_template)
                await asyncio.to_thread(front_end.warm_up)
                self._front_end = front_end

    async def sleep(self) -> None:
        """End the engines' processes, which gives all of their memory back. The tokenizer and checks stay."""
        await self.stop(EngineState.ASLEEP)

    def rest(self) -> None:
        """Take note that no engine runs, and that `wake_up` starts them."""
        for supervisor in self.supervisors:
            supervisor.state = EngineState.ASLEEP

    async def wake_up(self) -> None:
        """Start the engines again. Raises: as `start`; they then sleep on."""
        for supervisor in self.supervisors:
            supervisor.state = EngineState.STARTING
        try:
            await self.start()
        except BaseException:
            if self.state is not EngineState.STOPPED:
                await self.sleep()
            raise

    async def stop(self, state: EngineState = EngineState.STOPPED) -> None:
        """End the engines, and all requests with them."""
        await asyncio.gather(*(supervisor.stop(state) for supervisor in self.supervisors))

    # --- Requests -------------------------------------------------------------------------------

    async def submit(self, message: Submit, ready: asyncio.Event) -> RequestStream:
        """Send a request to an engine and return the stream of its updates, which sets `ready` at each.

        Raises: ApiError 503 while no engine takes requests; EngineDeadError.
        """
        if len(self.supervisors) == 1:
            return self.supervisors[0].client.submit(message, ready)
        prompt = await self._prompt_of(message.spec)
        _ = self.client  # raises while there is none
        load = choose(list(self._candidates()), prompt, self._num_placed)
        self._num_placed += 1
        stream = load.client.submit(message, ready)
        load.add(stream, prompt)
        return stream

    def abort(self, stream: RequestStream) -> None:
        """Abort a request whose reader is gone; does nothing if it has ended."""
        for supervisor in self.supervisors:
            if supervisor.is_ready:
                supervisor.client.abort(stream)

    async def _prompt_of(self, request: RequestSpec) -> Prompt:
        scheduler = self.front_end.config.scheduler
        if not (scheduler.enable_prefix_caching and request.reads_prefix_cache):
            return Prompt(request.num_prompt_tokens)
        if request.num_prompt_tokens < LONG_PROMPT:
            digests = prompt_digests(request, scheduler.block_size)
        else:
            digests = await asyncio.to_thread(prompt_digests, request, scheduler.block_size)
        return Prompt(request.num_prompt_tokens, scheduler.block_size, tuple(split(digests)))

    def _candidates(self) -> Iterator[EngineLoad]:
        """Yield the engines that take requests; silent ones only if all are."""
        ready = [supervisor for supervisor in self.supervisors if supervisor.is_ready]
        for supervisor in [item for item in ready if item.silence_s() < MAX_SILENT_S] or ready:
            load = self._loads.get(supervisor)
            if load is None or load.client is not supervisor.client:
                load = self._loads[supervisor] = EngineLoad(supervisor.client)
            load.drop_ended()
            yield load


def share_of(options: EngineOptions, rank: int) -> EngineOptions:
    """Return the options of one engine: KV memory that was chosen is divided, cores and other memory by the engine."""
    num_engines = options.data_parallel_size
    if num_engines == 1:
        return options
    changes = {
        name: max(1, value // num_engines)
        for name in ("kv_cache_memory_bytes", "num_blocks_override")
        if (value := getattr(options, name)) is not None
    }
    return replace(options, data_parallel_rank=rank, **changes)
