"""Small configs and requests, a driver that steps a scheduler through a `FakeExecutor`, and the run-alone reference."""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from quire.cache_spec import CacheGroup, PagedKV
from quire.config import SchedulerConfig
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler.request import Request, SequenceUpdate
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestResult, RequestSpec, SchedulerOutput, StepResult
from tests.fakes import FakeExecutor, chain, chain_all, token_after
from tests.scheduler.integrity import check_integrity

VOCAB_SIZE = 50


def make_groups(windows: Sequence[int | None] = (None,)) -> tuple[CacheGroup, ...]:
    """Return a cache group for each window; a window of None is full attention."""
    return tuple(CacheGroup((index,), PagedKV(1, 1, 1, window)) for index, window in enumerate(windows))


def make_config(*, windows: Sequence[int | None] = (None,), **changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "block_size": 4,
        "num_blocks": 101,
        "kv_cache_groups": make_groups(windows),
    }
    return SchedulerConfig(**{**values, **changes})


def make_request(
    request_id: str,
    prompt: int | Sequence[int] = 8,
    max_tokens: int = 4,
    *,
    n: int = 1,
    params: dict[str, Any] | None = None,
    **fields: Any,
) -> Request:
    """`prompt`: token ids, or a length: then ids that requests of other names do not have."""
    if isinstance(prompt, int):
        start = zlib.crc32(request_id.encode()) % 100_000 * 1000
        prompt = list(range(start, start + prompt))
    sampling = SamplingParams(n=n, max_tokens=max_tokens, **(params or {}))
    fields = {"sampling": sampling, "max_tokens": max_tokens, "arrival_time_s": 1.0, **fields}
    seed = fields.pop("seed", 0)
    own = {name: fields.pop(name) for name in tuple(fields) if name not in RequestSpec.__struct_fields__}
    first, *siblings = [
        Request(RequestSpec(f"{request_id}.{at}" if at else request_id, list(prompt), seed=seed + at, **fields), **own)
        for at in range(n)
    ]
    first.siblings = siblings
    return first


def make_pooling_request(request_id: str, prompt: int = 8, **fields: Any) -> Request:
    return make_request(request_id, prompt, sampling=None, pooling=PoolingParams(), **fields)


def make_beam(request_id: str, prompt: int | Sequence[int] = 8, max_tokens: int = 8) -> Request:
    return make_request(request_id, prompt, max_tokens, awaits_external_token=True)


class Driver:
    """A scheduler and a fake executor; checks the integrity of all blocks after every move."""

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler | None = None, **fake: Any) -> None:
        self.scheduler = scheduler or Scheduler(config)
        self.executor = FakeExecutor(config, **{"vocab_size": VOCAB_SIZE, **fake})
        self.outputs: list[SchedulerOutput] = []
        self.in_flight: deque[SchedulerOutput] = deque()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            check_integrity(self.scheduler)

    def submit(self, alone: str | None = None) -> SchedulerOutput:
        """Schedule one step; an empty step is not submitted."""
        output = self.scheduler.schedule(alone)
        check_integrity(self.scheduler)
        self.outputs.append(output)
        if output.scheduled or output.awaits_transfers:
            self.in_flight.append(output)
            self.executor.submit(output)
        return output

    def collect(self) -> list[SequenceUpdate]:
        """Update by the oldest step in flight."""
        updates = self.scheduler.update(self.in_flight.popleft(), self.executor.collect())
        check_integrity(self.scheduler)
        return updates

    def step(
        self, between: Callable[[SchedulerOutput], None] | None = None, alone: str | None = None
    ) -> list[SequenceUpdate]:
        """Run one step; `between` is called after `schedule` and before `update`."""
        output = self.submit(alone)
        if between is not None:
            between(output)
            check_integrity(self.scheduler)
        return self.collect() if self.in_flight else []

    def lose_steps(
        self, failed: Sequence[str] = (), *, is_executed: bool = True, alone: str | None = None
    ) -> list[SequenceUpdate]:
        """Lose all steps in flight, at least one, the oldest executed or not; some requests end by it."""
        if not self.in_flight:
            self.submit(alone)
        output = self.in_flight[0]
        if is_executed:
            self.executor.collect()
        self.executor._submitted.clear()
        self.in_flight.clear()
        results = tuple(RequestResult(request_id, error="at fault") for request_id in failed)
        updates = self.scheduler.update(output, StepResult(output.step_id, results, is_lost=True))
        check_integrity(self.scheduler)
        return updates

    def shares(self) -> dict[str, int]:
        """Run one step. Returns: request id → number of tokens that were scheduled for it."""
        self.step()
        return {item.request_id: item.num_tokens for item in self.outputs[-1].scheduled}

    def run(self, max_steps: int = 1000) -> None:
        """Step until all requests have ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    @property
    def all_blocks_are_home(self) -> bool:
        return self.scheduler.reset_prefix_cache()


def run_alone(request: Request, max_model_len: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return the tokens of a request by the definition of sampling and stopping: no scheduler, no blocks."""
    sampling, output = request.sampling, []
    assert sampling is not None
    digest = chain_all(request.prompt_token_ids)
    while True:
        token_id = token_after(digest, request.spec.seed, vocab_size)
        digest = chain(digest, token_id)
        output.append(token_id)
        may_stop = len(output) >= sampling.min_tokens
        is_eos = token_id in request.spec.eos_token_ids and not sampling.ignore_eos
        if may_stop and (is_eos or token_id in (sampling.stop_token_ids or ())):
            return output
        if len(output) == request.max_tokens or len(request.prompt_token_ids) + len(output) == max_model_len:
            return output
