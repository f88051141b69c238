"""Simulation of replicas of a model, in virtual time: Quire's own scheduler and placement, measured step times.

Only the model is not computed. A step's seconds come from `StepTimes`; the scheduler decides it as it does in a server,
prefix cache, chunked prefill and multi-step decode included. HTTP and tokenizing take a constant time of a replica's
core per token. Not simulated: the time that a process waits for a core.
Next to read: `step_times.py`; `__main__.py` asks the questions.
"""

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.cluster.step_times import StepTimes, work_of
from quire.config import STEP_S, SchedulerConfig
from quire.sampling_params import SamplingParams
from quire.scheduler.pace import Pace
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.server.placement import Prompt, choose, waiting_work
from quire.types import RequestResult, RequestSpec, SchedulerOutput, StepResult
from quire_workshop.load_client import highest_rate


@dataclass(slots=True)
class Job:
    """A request of a trace, and what became of it. Times in seconds from the trace's begin."""

    arrival_s: float
    prompt: list[int]
    num_generated: int
    first_s: float = math.nan
    last_s: float = math.nan
    num_cached: int = 0

    @property
    def ttft_s(self) -> float:
        """Return the time to the first token."""
        return self.first_s - self.arrival_s

    @property
    def token_s(self) -> float:
        """Return the mean time between tokens."""
        return (self.last_s - self.first_s) / max(1, self.num_generated - 1)


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency objective of a request: time to the first token, and mean time between tokens."""

    ttft_s: float
    token_s: float

    def holds(self, job: Job) -> bool:
        """Return True if a job met it; one that has not ended did not."""
        return job.ttft_s <= self.ttft_s and job.token_s <= self.token_s


@dataclass(frozen=True, slots=True)
class _Candidate(Prompt):
    request: Request | None = None


class SimulatedReplica:
    """A scheduler, and an executor that computes nothing but takes time. `tell` gets each job's new tokens.

    `front_s`: seconds of the replica's core per token that server and client take.
    """

    def __init__(
        self, config: SchedulerConfig, times: StepTimes, tell: Callable[[str, int, float], None], front_s: float = 0.0
    ) -> None:
        self.now_s = 0.0
        self.scheduler = Scheduler(config, clock=lambda: self.now_s)
        self.received: set[str] = set()
        self.wakes_at: float | None = None
        self._times, self._front_s = times, front_s
        self._tell = tell
        self._pace = Pace()
        self._output: SchedulerOutput | None = None
        self._started_s = self._iteration_s = 0.0

    @property
    def num_requests(self) -> int:
        """Return the requests that are waiting or running here."""
        return len(self.scheduler.requests.by_id)

    @property
    def num_queued_tokens(self) -> int:
        """Return the prompt tokens that wait here."""
        return sum(
            request.num_prompt_tokens
            for request in self.scheduler.requests.by_id.values()
            if not request.num_computed_tokens
        )

    def num_hit_tokens(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt's beginning that are cached here."""
        assert isinstance(prompt, _Candidate)
        assert prompt.request is not None
        return self.scheduler.blocks.lookup.find(prompt.request).num_tokens

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request; a step that decodes several times ends after its current iteration."""
        self.now_s = now_s
        self.scheduler.add_request(request)
        if self._output is None:
            self._start()
        elif self._iteration_s:
            passed = math.ceil((now_s - self._started_s) / self._iteration_s)
            self.wakes_at = min(self.wakes_at or math.inf, self._started_s + max(1, passed) * self._iteration_s)

    def wake(self, now_s: float) -> None:
        """End the step that ends now, and start the next one."""
        self.now_s = now_s
        output = self._output
        assert output is not None
        duration_s = now_s - self._started_s
        count = max(1, round(duration_s / self._iteration_s)) if self._iteration_s else 1
        results = [
            RequestResult(item.request_id, (0,) * min(count, item.max_new_tokens))
            for item in output.scheduled
            if item.max_new_tokens
        ]
        updates = self.scheduler.update(output, StepResult(output.step_id, tuple(results), num_iterations=count))
        self._pace.note(
            output.num_tokens * count, duration_s, num_iterations=count,
            has_prompts=any(item.num_tokens > 1 for item in output.scheduled),
        )  # fmt: skip
        for update in updates:
            self._tell(update.request.request_id, len(update.new_token_ids), now_s)
        self._start(self._front_s * sum(len(update.new_token_ids) for update in updates))

    def _start(self, busy_s: float = 0.0) -> None:
        """Start a step, `busy_s` seconds from now."""
        output = self.scheduler.schedule(None, self._pace.step_tokens)
        self._output = output if output.scheduled else None
        self.wakes_at = None
        if self._output is not None:
            seconds = self._times.seconds(work_of(output, self.received))
            most = max(item.max_new_tokens for item in output.scheduled)
            self._iteration_s = seconds if most > 1 else 0.0
            self._started_s = self.now_s + busy_s
            self.wakes_at = self._started_s + seconds * max(1, min(most, int(STEP_S / seconds)))


@dataclass(slots=True)
class Cluster:
    """Replicas, and the choice among them. `decode`: these decode what `replicas` have prefilled; else each does both.

    handover_s: seconds per token to move a prompt's KV from one to the other.
    """

    replicas: list[SimulatedReplica] = field(default_factory=list)
    decode: list[SimulatedReplica] = field(default_factory=list)
    policy: str = "prefix"
    handover_s: float = 0.0
    _jobs: dict[str, Job] = field(default_factory=dict)
    _queue: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _counter: Iterable[int] = field(default_factory=itertools.count)

    @classmethod
    def build(
        cls, times: StepTimes, config: SchedulerConfig, num_replicas: int, *, num_decode: int = 0,
        policy: str = "prefix", handover_s: float = 0.0, front_s: float = 0.0,
    ) -> "Cluster":  # fmt: skip
        """Make a cluster of equal replicas; `num_decode` more that only decode. `front_s`: see `SimulatedReplica`."""
        cluster = cls(policy=policy, handover_s=handover_s)
        cluster.replicas = [SimulatedReplica(config, times, cluster._note, front_s) for _ in range(num_replicas)]
        cluster.decode = [SimulatedReplica(config, times, cluster._note, front_s) for _ in range(num_decode)]
        return cluster

    def run(self, jobs: Sequence[Job]) -> list[Job]:
        """Run a trace to its end; returns the same jobs with their times."""
        for index, job in enumerate(jobs):
            self._jobs[str(index)] = job
            self._at(job.arrival_s, partial(self._place, str(index)))
        everyone = self.replicas + self.decode
        while True:
            first = min(everyone, key=lambda replica: math.inf if replica.wakes_at is None else replica.wakes_at)
            if self._queue and (first.wakes_at is None or self._queue[0][0] <= first.wakes_at):
                now_s, _, act = heapq.heappop(self._queue)
                act(now_s)
            elif first.wakes_at is not None:
                first.wake(first.wakes_at)
            else:
                return list(jobs)

    def _at(self, when_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._queue, (when_s, next(iter(self._counter)), act))

    def _place(self, name: str, now_s: float) -> None:
        job = self._jobs[name]
        request = _request(name, job.prompt, 1 if self.decode else job.num_generated)
        replica = _choose(self.policy, self.replicas, _Candidate(len(job.prompt), request=request), int(name))
        job.num_cached = replica.num_hit_tokens(_Candidate(len(job.prompt), request=request))
        replica.add(request, now_s)

    def _note(self, name: str, num_new: int, now_s: float) -> None:
        job = self._jobs[name]
        if not num_new:
            return
        if math.isnan(job.first_s):
            job.first_s = now_s
            if self.decode and job.num_generated > 1:
                self._at(now_s + self.handover_s * len(job.prompt), partial(self._hand_over, name))
        job.last_s = now_s

    def _hand_over(self, name: str, now_s: float) -> None:
        """Let a replica decode a request whose prompt was computed elsewhere."""
        job = self._jobs[name]
        request = _request(name, [*job.prompt, 0], job.num_generated - 1)
        replica = _choose("least-loaded", self.decode, _Candidate(len(job.prompt), request=request), int(name))
        replica.received.add(name)
        replica.add(request, now_s)


def _choose(policy: str, replicas: Sequence[SimulatedReplica], prompt: _Candidate, turn: int) -> SimulatedReplica:
    """Return the replica of a request: with the policy "prefix" as the server chooses its engines."""
    if policy == "prefix":
        return choose(replicas, prompt, turn)
    start = turn % len(replicas)
    rotated = [*replicas[start:], *replicas[:start]]
    return rotated[0] if policy == "round-robin" else min(rotated, key=waiting_work)


def _request(name: str, prompt: list[int], num_generated: int) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=num_generated, ignore_eos=True)
    return Request(RequestSpec(name, prompt, sampling, max_tokens=num_generated))


def poisson_trace(
    rate: float, duration_s: float, *, prompt_len: int, num_generated: int, num_shared: int = 0, shared_len: int = 0,
    seed: int = 1,
) -> list[Job]:  # fmt: skip
    """Return requests with exponential gaps.

    With `num_shared`, each prompt begins with one of `num_shared` prefixes of `shared_len` tokens, chosen by Zipf's law
    (the k-th is chosen 1/k as often as the first), and ends with `prompt_len` tokens of its own.
    """
    chance, jobs, now_s = random.Random(seed), [], 0.0
    weights = [1 / rank for rank in range(1, num_shared + 1)]
    while (now_s := now_s + chance.expovariate(rate)) < duration_s:
        own = [chance.getrandbits(30) + 1_000_000 for _ in range(prompt_len)]
        shared = chance.choices(range(num_shared), weights)[0] if num_shared else 0
        jobs.append(Job(now_s, [shared + 1] * (shared_len if num_shared else 0) + own, num_generated))
    return jobs


def attainment(jobs: Sequence[Job], objective: Objective) -> float:
    """Return the share of jobs that met the objective."""
    return statistics.fmean(map(objective.holds, jobs)) if jobs else 1.0


def capacity(simulate: Callable[[float], Sequence[Job]], objective: Objective, *, share: float = 0.95) -> float:
    """Return the highest rate (requests per second, within 3 %) at which `share` of the jobs meet the objective."""
    return highest_rate(lambda rate: attainment(simulate(rate), objective) >= share, 1.0, num_halvings=5)
