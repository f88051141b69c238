"""Thousands of steps of random work: whatever happens, tokens are those of the request alone and blocks come home."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from quire.config import SchedulerConfig
from quire.errors import CapacityError, InvalidParameterError
from quire.events import EventKind, EventLog
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler import step_plan
from quire.scheduler.scheduler import Scheduler
from quire.types import Request, RequestStatus, SequenceUpdate
from tests.fakes import chain_all, token_after
from tests.scheduler.builders import Driver, make_groups, run_alone

VOCAB_SIZE = 12
MAX_MODEL_LEN = 40
_RANDOM = random.Random(5)
_FIRST = [_RANDOM.randrange(VOCAB_SIZE) for _ in range(30)]
# The second base shares eight tokens with the first, the third none.
BASES = [_FIRST, _FIRST[:8] + _FIRST[20:], [_RANDOM.randrange(VOCAB_SIZE) for _ in range(30)]]
MAX_STEPS = 4000


@pytest.fixture(scope="module", autouse=True)
def small_shares() -> Iterator[None]:
    """Prompts here are as long as the smallest share of a step that prompts get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "MIN_STEP_TOKENS", 2)
        yield


@dataclass(frozen=True)
class Job:
    """One request to be made, when it arrives, and when it is aborted."""

    base: int
    shared_len: int
    own: tuple[int, ...]
    kind: str
    n: int
    max_tokens: int
    min_tokens: int
    arrival_step: int
    abort_step: int | None
    abort_in_flight: bool
    priority: int
    salt: str
    reads_prefix_cache: bool
    ends_at_eos: bool
    fails_after: int | None
    """So many tokens were generated when no further one can be chosen."""

    def request(self, index: int) -> Request:
        prompt = BASES[self.base][: self.shared_len] + list(self.own)
        stops = {"eos_token_ids": frozenset({0}) if self.ends_at_eos else frozenset()}
        sampling = SamplingParams(
            n=self.n, max_tokens=self.max_tokens, min_tokens=min(self.min_tokens, self.max_tokens), stop_token_ids=[1]
        )

        def make(name: str, seed: int) -> Request:
            return Request(
                name,
                list(prompt),
                None if self.kind == "pooling" else sampling,
                PoolingParams() if self.kind == "pooling" else None,
                max_tokens=self.max_tokens,
                seed=seed,
                arrival_time_s=float(self.arrival_step),
                priority=self.priority,
                hash_extras=(self.salt,),
                reads_prefix_cache=self.reads_prefix_cache,
                awaits_external_token=self.kind == "beam",
                **stops,
            )

        leader = make(f"r{index}", index)
        if self.kind == "sampling":
            leader.siblings = [make(f"r{index}.{at}", index + 100 * at) for at in range(1, self.n)]
        return leader


jobs = st.builds(
    Job,
    base=st.integers(0, 2),
    shared_len=st.integers(0, 22),
    own=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6).map(tuple),
    kind=st.sampled_from(["sampling", "sampling", "sampling", "beam", "pooling"]),
    n=st.sampled_from([1, 1, 2, 3]),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 4),
    arrival_step=st.integers(1, 25),
    abort_step=st.none() | st.integers(1, 40),
    abort_in_flight=st.booleans(),
    priority=st.integers(0, 2),
    salt=st.sampled_from(["", "", "salt"]),
    reads_prefix_cache=st.sampled_from([True, True, True, False]),
    ends_at_eos=st.booleans(),
    fails_after=st.sampled_from([None, None, None, 0, 1, 2, 3, 5, 8]),
)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    chunked = draw(st.booleans())
    return SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 24)) if chunked else MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        block_size=draw(st.integers(1, 5)),
        num_blocks=draw(st.integers(8, 60)),
        kv_cache_groups=make_groups(
            draw(st.sampled_from([(None,), (None,), (6,), (None, 5), (3, 9), (1,), (None, 7, None)]))
        ),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        enable_chunked_prefill=chunked,
        max_num_partial_prefills=draw(st.integers(1, 3)),
        max_long_partial_prefills=draw(st.integers(1, 2)),
        long_prefill_token_threshold=draw(st.integers(0, 8)) if chunked else 0,
        prefill_tokens_per_decode=draw(st.sampled_from((None, 1, 3))) if chunked else None,
        max_decode_rounds=draw(st.sampled_from([1, 1, 2, 5])),
        policy=draw(st.sampled_from(["fcfs", "priority", "sjf"])),
    )


class Workload:
    """Adds, aborts and steps by plan; plays the engine's part for beams; checks each token as it comes."""

    def __init__(self, config: SchedulerConfig, plan: list[Job], lost: frozenset[int] = frozenset()) -> None:
        """`lost`: the steps whose results never come; after each of them its requests run alone."""
        self.config = config
        self.plan = plan
        self.lost = lost
        self.suspects: list[tuple[Request, int]] = []
        self.events = EventLog(1_000_000)
        self.driver = Driver(config, Scheduler(config, self.events), vocab_size=VOCAB_SIZE)
        self.driver.executor.fails = self._fails
        self.accepted: dict[str, Request] = {}
        self.ended: Counter[str] = Counter()
        self.num_checked: Counter[str] = Counter()
        self.beams: dict[int, dict[str, int | None]] = {}

    def run(self) -> None:
        for step in range(1, MAX_STEPS):
            self._arrivals(step)
            late = [index for index, job in enumerate(self.plan) if job.abort_step == step and job.abort_in_flight]
            self._abort(index for index, job in enumerate(self.plan) if job.abort_step == step and index not in late)
            if step in self.lost:
                self._lose_step(step)
                self._abort(late)
            else:
                for update in self.driver.step(lambda _, late=late: self._abort(late), self._alone()):
                    self._check(update)
            self._advance_beams()
            if step > 40 and not self.driver.scheduler.has_unfinished:
                break
        else:
            raise AssertionError(f"{list(self.accepted)} not finished after {MAX_STEPS} steps")

    def _fails(self, request_id: str, num_tokens: int) -> bool:
        job = self.plan[int(re.findall(r"\d+", request_id)[0])]
        if job.kind != "sampling" or job.fails_after is None:
            return False
        return num_tokens == job.shared_len + len(job.own) + job.fails_after

    def _lose_step(self, step: int) -> None:
        scheduler = self.driver.scheduler
        assert self.driver.lose_step(is_executed=step % 2 == 0, alone=self._alone()) == []
        assert scheduler.num_running == 0
        lost = [scheduler.get(item.request_id) for item in self.driver.outputs[-1].scheduled]
        self.suspects = [(request, request.num_tokens) for request in lost if request is not None][:3]

    def _alone(self) -> str | None:
        """The first suspect that lives and has not yet computed what it had."""
        while self.suspects:
            request, num_tokens = self.suspects[0]
            if self.driver.scheduler.get(request.request_id) is request and request.num_computed_tokens < num_tokens:
                return request.request_id
            self.suspects.pop(0)
        return None

    def check_end(self) -> None:
        assert set(self.ended) == set(self.accepted)
        assert set(self.ended.values()) <= {1}
        told = Counter(item.request_id for item in self.events.of(EventKind.FINISH))
        assert told == self.ended
        assert self.driver.all_blocks_are_home
        for request in self.accepted.values():
            if request.sampling is not None and not request.awaits_external_token:
                alone = run_alone(request, MAX_MODEL_LEN, VOCAB_SIZE)
                whole = request.status not in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
                assert request.output_token_ids == (alone if whole else alone[: len(request.output_token_ids)])

    def _arrivals(self, step: int) -> None:
        for index, job in enumerate(self.plan):
            if job.arrival_step != step:
                continue
            request = job.request(index)
            members = [request, *request.siblings]
            try:
                self.driver.add(request)
            except (CapacityError, InvalidParameterError):
                continue
            self.accepted |= {item.request_id: item for item in members}
            if job.kind == "beam":
                self.beams[index] = {request.request_id: None}

    def _abort(self, indices: object) -> None:
        for index in indices:  # type: ignore[attr-defined]
            ids = [f"r{index}", f"r{index}.1"] if index not in self.beams else list(self.beams.pop(index))
            self._note_ended(self.driver.scheduler.abort(ids))

    def _note_ended(self, requests: list[Request]) -> None:
        self.ended.update(request.request_id for request in requests)

    def _check(self, update: SequenceUpdate) -> None:
        request, result = update.request, update.result
        if update.status.is_finished:
            self._note_ended([request])
        if request.sampling is None or result.error is not None:
            return
        known = request.prompt_token_ids + request.output_token_ids
        if update.new_token_id is not None:
            self.num_checked[request.request_id] += 1
            known = known[: request.num_prompt_tokens + self.num_checked[request.request_id] - 1]
        assert result.token_id == token_after(chain_all(known), request.seed, VOCAB_SIZE)
        if request.awaits_external_token:
            assert update.new_token_id is None
            for beams in self.beams.values():
                if request.request_id in beams:
                    assert beams[request.request_id] is None, "sampled twice at one position"
                    beams[request.request_id] = result.token_id

    def _advance_beams(self) -> None:
        """As in beam search: when all beams of a job have reported, each goes on; some fork, the others' worst ends."""
        scheduler = self.driver.scheduler
        for index, beams in list(self.beams.items()):
            if any(token_id is None for token_id in beams.values()):
                continue
            job = self.plan[index]
            going_on: dict[str, int | None] = {}
            for request_id, token_id in list(beams.items()):
                request = scheduler.get(request_id)
                assert request is not None
                assert token_id is not None
                if len(request.output_token_ids) + 1 >= min(job.max_tokens, MAX_MODEL_LEN - request.num_prompt_tokens):
                    self._note_ended(scheduler.finish(request_id, RequestStatus.FINISHED_LENGTH))
                    continue
                if len(beams) + len(going_on) < 2 * job.n:
                    child = job.request(index)
                    child.request_id = f"{request_id}+{len(request.output_token_ids)}"
                    scheduler.fork(request_id, child)
                    self.accepted[child.request_id] = child
                    if (index + token_id) % 3:  # a fork may also sample before it gets its token
                        scheduler.append_token(child.request_id, (token_id + 1) % VOCAB_SIZE)
                        going_on[child.request_id] = None
                    else:
                        going_on[child.request_id] = (token_id + 1) % VOCAB_SIZE
                scheduler.append_token(request_id, token_id)
                going_on[request_id] = None
            self.beams[index] = going_on
            if not going_on:
                del self.beams[index]
        scheduler.check_integrity()


@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    config=configs(),
    plan=st.lists(jobs, min_size=1, max_size=9),
    lost=st.just(frozenset()) | st.frozensets(st.integers(1, 60), max_size=8),
)
def test_random_workloads(config: SchedulerConfig, plan: list[Job], lost: frozenset[int]) -> None:
    workload = Workload(config, plan, lost)
    workload.run()
    workload.check_end()
    if workload.events.of(EventKind.PREEMPT):
        event("preempted")


def test_the_workloads_reach_what_they_are_for() -> None:
    """Against a generator that has gone dull: across seeds everything that can happen does."""
    kinds: Counter[EventKind] = Counter()
    num_steps = num_further = num_cached = 0
    for seed in range(40):
        rng = random.Random(seed)
        # Half of the seeds: long decodes under priority, where a victim often already has its share of the step.
        crowded = seed % 2 == 0
        config = SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=rng.choice([3, 9, 30]),
            max_model_len=MAX_MODEL_LEN,
            block_size=rng.choice([2, 3, 4]),
            num_blocks=rng.randrange(22, 40),
            kv_cache_groups=make_groups(rng.choice([(None,), (None, 5)])),
            max_decode_rounds=rng.choice([1, 4]),
            policy="priority" if crowded else rng.choice(["fcfs", "priority", "sjf"]),
        )
        plan = [
            Job(
                base=rng.randrange(3), shared_len=rng.randrange(20), own=tuple(rng.choices(range(9), k=3)),
                kind="sampling" if crowded else rng.choice(["sampling", "beam", "pooling"]), n=rng.randrange(1, 4),
                max_tokens=14 if crowded else rng.randrange(1, 14), min_tokens=rng.randrange(9),
                arrival_step=rng.randrange(1, 20),
                abort_step=None if crowded else rng.choice([None, rng.randrange(40)]),
                abort_in_flight=rng.random() < 0.5, priority=rng.randrange(3), salt="", reads_prefix_cache=True,
                ends_at_eos=False, fails_after=None,
            )
            for _ in range(12)
        ]  # fmt: skip
        workload = Workload(config, plan)
        workload.run()
        workload.check_end()
        kinds.update(item.kind for item in workload.events)
        num_steps += workload.driver.executor.num_steps
        num_further += sum(output.max_rounds > 1 for output in workload.driver.outputs)
        num_cached += sum(request.num_cached_tokens for request in workload.accepted.values())
    assert num_steps > 1000
    assert num_further > 20
    assert num_cached > 1000
    for kind in (EventKind.PREEMPT, EventKind.COPY, EventKind.SHARE, EventKind.EVICT):
        assert kinds[kind] > 20, kind
