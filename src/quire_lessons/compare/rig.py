"""`Rig`: one executor that every mode of a comparison shares. `drive`: a workload through an engine, with a record.

Time is virtual: a step takes one unit with the fake executor and its measured seconds with a model; a pause until the
next arrival takes no real time. So a model's run is as short as its computation. A comparison may take a share of the
memory that is available. Next to read: `batching.py`.
"""

import contextlib
import math
import random
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from quire.adapter import Adapter
from quire.byte_sizes import format_bytes
from quire.cache_spec import PagedKV
from quire.config import EngineConfig, EngineOptions, Hardware, ModelConfig
from quire.engine.llm_engine import LLMEngine
from quire.errors import ComparisonError, ConfigError, EngineError, MemoryCapacityError
from quire.events import EventKind, EventLog, OpTime
from quire.outputs import RequestOutput
from quire.resolve import resolve
from quire.runtime.hardware import ADDRESS_SPACE_LIMITS, detect_hardware, has_gpu_driver
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestResult, ScheduledRequest, SchedulerOutput, StepResult
from quire_lessons.compare.results import FAKE_MODEL, Progress, RunSettings, TimedRequest

if TYPE_CHECKING:
    from quire.parallel.executor import Executor
    from quire.weights.checkpoint import Checkpoint


# --- Memory: what would take more than a share is refused, with the number that fits --------------
# The share is a limit of the process, which engines see as that of their machine, and which holds what no plan counts.

SHARE = 0.75
LIMIT = f"{SHARE:.0%} of the memory that is available"
PROMPT_TOKEN_BYTES = 64
"""Integers of Python in a prompt and in the engine's copy of it; measured: 40 to 60."""
OUTPUT_TOKEN_BYTES = 3 * 200
"""Entries in the records of three modes, which have one per request and step; measured: 190 each."""


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process take `SHARE` of the available memory at most.

    Not where there is the driver of a GPU, which reserves addresses that it does not use.
    Raises: MemoryCapacityError in place of MemoryError.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    share_bytes = int(SHARE * detect_hardware("cpu").available_memory_bytes)
    most = psutil.Process().memory_info().data + share_bytes
    try:
        if not has_gpu_driver():
            hard = before[1]
            resource.setrlimit(
                resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
            )
        yield
    except MemoryError:
        needs = f"the comparison needs more than {format_bytes(share_bytes)}, {LIMIT}"
        raise MemoryCapacityError(f"{needs}: fewer requests, or a shorter context, may fit") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@dataclass(frozen=True, slots=True)
class Size:
    """A setting that decides how much memory an engine needs, and the engine's options for each value of it."""

    name: str
    value: int
    options: Callable[[int], Mapping[str, Any]]

    def refusal(self, error: MemoryCapacityError, decide: Callable[[Mapping[str, Any]], object]) -> MemoryCapacityError:
        """Return an engine's refusal with the value that fits. `decide` raises MemoryCapacityError for options that
        do not fit."""
        low, high = 0, self.value
        while high - low > 1:
            middle = (low + high) // 2
            try:
                decide(self.options(middle))
                low = middle
            except MemoryCapacityError:
                high = middle
        message = error.message.replace(ADDRESS_SPACE_LIMITS[resource.RLIMIT_DATA][0], LIMIT)
        if low:
            message = f"{message.rpartition(': ')[0]}: {self.name}={low} fits"
        return MemoryCapacityError(message)


def checked(jobs: Iterable[TimedRequest]) -> list[TimedRequest]:
    """Return requests as they are drawn.

    Raises: MemoryCapacityError once they, and the records of their steps, need more than is available.
    """
    found: list[TimedRequest] = []
    available, num_bytes = detect_hardware("cpu").available_memory_bytes, 0
    for job in jobs:
        num_bytes += PROMPT_TOKEN_BYTES * len(job.prompt) + OUTPUT_TOKEN_BYTES * job.num_tokens
        if num_bytes > available:
            raise MemoryCapacityError(
                f"requests of up to {max(len(job.prompt) + job.num_tokens for job in [job, *found])} tokens, and the "
                f"records of their steps, need more than {format_bytes(available)}, {LIMIT}: requests={len(found)} fits"
            )
        found.append(job)
    return found


# --- Runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step, or a pause if it has no requests. `num_waiting`: requests in the queue after it was scheduled."""

    start: float
    duration: float
    scheduled: tuple[ScheduledRequest, ...]
    num_waiting: int
    ops: tuple[OpTime, ...]


@dataclass(slots=True)
class Run:
    """Record of a workload in one mode. Lists have an entry per job."""

    outputs: list[tuple[int, ...]]
    started: list[float]
    ended: list[float]
    steps: list[RecordedStep] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def makespan(self) -> float:
        """End of the last step."""
        return self.steps[-1].start + self.steps[-1].duration

    @property
    def num_computed(self) -> int:
        """Tokens that the executor computed."""
        return sum(item.num_tokens for step in self.steps for item in step.scheduled)


class FakeExecutor:
    """An executor without a model: the next token is a function of all earlier ones, read through the block table.

    A block that two requests share by mistake, or that lost its content, changes the tokens.
    """

    max_in_flight = 1

    def __init__(self, config: EngineConfig) -> None:
        scheduler = config.scheduler
        self._vocab_size = config.model.vocab_size
        self._block_size = scheduler.block_size
        self._memory = np.zeros((scheduler.num_blocks, scheduler.block_size), np.int64)
        self._factors = np.random.default_rng(0).integers(1, 1 << 31, scheduler.max_model_len + 1)
        self._tokens: dict[str, list[int]] = {}
        self._tables: dict[str, list[int]] = {}
        self._submitted: SchedulerOutput | None = None

    def read_adapters(self, wanted: Sequence[Adapter], wait_s: float) -> set[str]:
        """See `Executor`. Its requests have no adapters."""
        return set()

    def submit(self, output: SchedulerOutput) -> None:
        """See `Executor`."""
        self._submitted = output

    def collect(self) -> StepResult:
        """See `Executor`."""
        output, self._submitted = self._submitted, None
        assert output is not None
        for request_id in (*output.preempted_ids, *output.finished_ids):
            del self._tokens[request_id], self._tables[request_id]
        contents = [self._memory[list(item.source_ids)] for item in output.transfers]
        for item, content in zip(output.transfers, contents, strict=True):
            self._memory[list(item.target_ids)] = content
        for new in output.new_requests:
            self._tokens[new.request_id], self._tables[new.request_id] = list(new.token_ids), []
        for share in output.scheduled:
            self._write(share)
        return StepResult(output.step_id, tuple(self._sample(it) for it in output.scheduled if it.max_new_tokens))

    def _write(self, share: ScheduledRequest) -> None:
        table, update = self._tables[share.request_id], share.block_table_updates[0]
        table[update.start :] = update.block_ids
        start, end = share.num_computed_tokens, share.num_computed_tokens + share.num_tokens
        tokens, size = self._tokens[share.request_id], self._block_size
        for index in range(start // size, -(-end // size)):
            low, high = max(start, index * size), min(end, index * size + size)
            self._memory[table[index], low - index * size : high - index * size] = tokens[low:high]

    def _sample(self, share: ScheduledRequest) -> RequestResult:
        known = self._memory[self._tables[share.request_id]].ravel()
        end = share.num_computed_tokens + share.num_tokens
        token_id = int((known[:end] + 1) @ self._factors[:end] >> 5) % self._vocab_size
        self._tokens[share.request_id].append(token_id)
        return RequestResult(share.request_id, (token_id,))

    def end_step_early(self) -> None:
        """See `Executor`."""

    def shutdown(self) -> None:
        """See `Executor`."""


class SharedExecutor:
    """Passes steps to the rig's executor, keeps the newest one for the record, and outlives each mode's engine."""

    max_in_flight = 1

    def __init__(self, executor: "Executor") -> None:
        self.submitted: SchedulerOutput | None = None
        self.collect, self.end_step_early = executor.collect, executor.end_step_early
        self.read_adapters = executor.read_adapters
        self._submit = executor.submit

    def submit(self, output: SchedulerOutput) -> None:
        """See `Executor`."""
        self.submitted = output
        self._submit(output)

    def shutdown(self) -> None:
        """Leave the executor to the next mode."""


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


MakeScheduler = Callable[[EngineConfig, EventLog, Clock], Scheduler]


class Rig:
    """The executor and the configuration that all modes of a comparison share."""

    def __init__(
        self,
        settings: RunSettings,
        model: str,
        progress: Progress,
        hf_config: Mapping[str, Any] | None = None,
        size: Size | None = None,
        **options: Any,
    ) -> None:
        """`hf_config`: of a model with random weights, in place of `model`; `options`: of `EngineOptions`, beside those
        of the setting `size`.

        Raises: ConfigError, ModelError, CapacityError.
        """
        self.progress = progress
        self.is_fake = model == FAKE_MODEL
        self.unit = "steps" if self.is_fake else "seconds"
        if not self.is_fake:
            progress(f"loading {model}", 0, 1)
        checkpoint = None if self.is_fake else _open(model, hf_config)

        def decide(more: Mapping[str, Any]) -> EngineConfig:
            chosen = EngineOptions(
                model=model,
                seed=settings.seed,
                enable_prefix_caching=False,
                multi_step_decode=1,
                speculative="off",
                batch_invariant=True,
                **options,
                **more,
            )
            return _resolve(chosen, checkpoint)

        try:
            self.config = decide({} if size is None else size.options(size.value))
        except (ConfigError, MemoryCapacityError) as error:
            refusal = size.refusal(error, decide) if size and isinstance(error, MemoryCapacityError) else error
            raise type(error)(_rename_options(refusal.message)) from None
        self.executor: Executor = FakeExecutor(self.config) if checkpoint is None else _load(self.config, checkpoint)
        self._num_runs = 0

    def drive(
        self,
        mode: str,
        jobs: Sequence[TimedRequest],
        make_scheduler: MakeScheduler = lambda config, events, clock: Scheduler(config.scheduler, events, clock),
        observe: Callable[[Scheduler], None] = lambda scheduler: None,
        wakes_at: Callable[[bool], float] = lambda more_come: math.inf,
        *,
        times_ops: bool = False,
    ) -> Run:
        """Run the jobs to their end. `observe` is called after each step.

        `wakes_at`: told before each step whether more jobs will arrive, returns the time at which a queue that does
        not run yet starts. Raises: EngineError if a request fails.
        """
        clock, events = Clock(), EventLog(4096)
        shared = SharedExecutor(self.executor)
        engine = LLMEngine(
            self.config, shared, events=events, scheduler=make_scheduler(self.config, events, clock), clock=clock
        )
        engine.watch(None, int(times_ops))
        self._num_runs += 1
        names = [f"{self._num_runs}-{mode}-{index}" for index in range(len(jobs))]
        index_of = {name: index for index, name in enumerate(names)}
        run = Run([()] * len(jobs), [math.nan] * len(jobs), [math.nan] * len(jobs))
        coming = deque(sorted(range(len(jobs)), key=lambda index: jobs[index].arrival))
        num_seen = num_done = 0
        while coming or engine.has_unfinished_requests():
            while coming and jobs[coming[0]].arrival <= clock.now:
                index = coming.popleft()
                params = SamplingParams(temperature=0, max_tokens=jobs[index].num_tokens, ignore_eos=True)
                engine.add_request(names[index], {"prompt_token_ids": list(jobs[index].prompt)}, params)
            wakes_at_s = wakes_at(bool(coming))
            shared.submitted = None
            start, measured = clock.now, time.perf_counter()
            outputs = engine.step()
            measured = time.perf_counter() - measured
            if shared.submitted is None:
                clock.now = max(start, _next_s(mode, jobs[coming[0]].arrival if coming else math.inf, wakes_at_s))
            else:
                clock.now += 1.0 if self.is_fake else measured
            scheduled, ops = () if shared.submitted is None else shared.submitted.scheduled, ()
            for event in events.since(num_seen):
                run.num_preemptions += event.kind is EventKind.PREEMPT
                ops = event.data["ops"] if event.kind is EventKind.OPS else ops
                if event.kind is EventKind.ADMIT and math.isnan(run.started[index_of[event.request_id]]):
                    run.started[index_of[event.request_id]] = start
            num_seen = events.num_recorded
            run.steps.append(RecordedStep(start, clock.now - start, scheduled, engine.scheduler.num_waiting, ops))
            for output in outputs:
                if output.finished:
                    index, num_done = index_of[output.request_id], num_done + 1
                    run.outputs[index], run.ended[index] = _tokens(output, jobs[index]), clock.now
            observe(engine.scheduler)
            self.progress(mode, num_done, len(jobs))
        return run


def _next_s(mode: str, arrives_at_s: float, wakes_at_s: float) -> float:
    """Return the time of the next event of an idle engine. Raises: EngineError if there is none."""
    if math.inf == arrives_at_s == wakes_at_s:
        raise EngineError(f"{mode}: requests wait, but none can start")
    return min(arrives_at_s, wakes_at_s)


def check_outputs_equal(runs: Mapping[str, Run]) -> int:
    """Compare every mode's tokens with the first mode's. Returns: the number of requests. Raises: ComparisonError."""
    (first, expected), *others = runs.items()
    for mode, run in others:
        for index, (wanted, got) in enumerate(zip(expected.outputs, run.outputs, strict=True)):
            if wanted != got:
                at = next(at for at in range(len(wanted) + 1) if wanted[: at + 1] != got[: at + 1])
                raise ComparisonError(
                    f"request {index} got different tokens from {first} and {mode}, first at output token {at}: "
                    f"{wanted[at : at + 4]} and {got[at : at + 4]}"
                )
    return len(expected.outputs)


def load(options: EngineOptions, checkpoint: "Checkpoint") -> tuple[EngineConfig, "Executor"]:
    """Load a model without its tokenizer. Raises: ConfigError, ModelError, CapacityError."""
    config = _resolve(options, checkpoint)
    return config, _load(config, checkpoint)


def _resolve(options: EngineOptions, checkpoint: "Checkpoint | None") -> EngineConfig:
    """Decide how to run a checkpoint, or the fake model without one."""
    if checkpoint is None:
        return resolve(options, Hardware("cpu", 1 << 36, 1 << 36, True, 1), fake_model())
    from quire.engine.build import resolve_config

    return resolve_config(options, checkpoint)


def _load(config: EngineConfig, checkpoint: "Checkpoint") -> "Executor":
    from quire.parallel.tensor_parallel import create_executor

    return create_executor(config, checkpoint)


def _tokens(output: Any, job: TimedRequest) -> tuple[int, ...]:
    assert isinstance(output, RequestOutput)
    completion = output.outputs[0]
    if len(completion.token_ids) != job.num_tokens:
        raise EngineError(
            f"request {output.request_id} ended after {len(completion.token_ids)} tokens: {completion.error}"
        )
    return tuple(completion.token_ids)


def _rename_options(message: str) -> str:
    """Name the settings of a comparison instead of the engine's options, which it chooses."""
    message = re.sub(r"--max-model-len \d+ fits, ", "", message)
    for name, own in (("max-model-len", "context"), ("max_model_len", "context"), ("kv-cache-memory-bytes", "pool")):
        message = message.replace(name, own)
    return message


def _open(model: str, hf_config: Mapping[str, Any] | None) -> "Checkpoint":
    from quire.weights.checkpoint import Checkpoint, open_checkpoint
    from quire.weights.sources import ModelFiles, resolve_source

    if hf_config is None:
        return open_checkpoint(resolve_source(model))
    return Checkpoint(ModelFiles(model, Path(), "hf", "local"), hf_config)


def fake_model() -> ModelConfig:
    """Shape of SmolLM2-135M, so that the KV cache has its bytes per token."""
    return ModelConfig(
        architecture="fake",
        hf_config={},
        vocab_size=49_152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        context_len=1 << 17,
        num_parameters=0,
        cache_specs=(PagedKV(3, 64, 1),) * 30,
    )


def given_jobs(
    seed: int, lengths: Sequence[tuple[int, int]], rate: float | None, vocab_size: int
) -> list[TimedRequest]:
    """Requests of given prompt and output lengths; all there at once, or with Poisson arrivals.

    Raises: MemoryCapacityError.
    """

    def draw() -> Iterator[TimedRequest]:
        generator, arrival = random.Random(seed), 0.0
        for prompt_len, num_tokens in lengths:
            yield TimedRequest(draw_prompt(generator, prompt_len, vocab_size), num_tokens, arrival)
            if rate is not None and rate != math.inf:
                arrival += generator.expovariate(rate)

    return checked(draw())


def draw_prompt(generator: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    """Return a prompt of random tokens."""
    return tuple(generator.randrange(vocab_size) for _ in range(length))
