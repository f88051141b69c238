"""Random schedules of models with any kinds of cache: tokens are those of the request alone, all blocks come home.

Requests of every kind come, fork, fail and are aborted at random moments, with up to three steps in flight, several
tokens a step, right and wrong drafts, and lost steps. The integrity of blocks and requests is checked after every move.
"""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from quire.cache_spec import CacheGroup, CacheSpec, LatentKV, PagedKV, RecurrentState
from quire.config import SchedulerConfig
from quire.errors import CapacityError
from quire.events import EventKind, EventLog
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler import pace
from quire.scheduler.prefix_cache import PrefixChain
from quire.scheduler.request import Request, SequenceUpdate
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestSpec, RequestStatus
from tests.fakes import chain_all, token_after
from tests.scheduler.builders import Driver, make_groups, run_alone
from tests.scheduler.integrity import check_integrity

NUM_WORKLOADS = 300
VOCAB_SIZE = 12
MAX_MODEL_LEN = 40
_RANDOM = random.Random(5)
_FIRST = [_RANDOM.randrange(VOCAB_SIZE) for _ in range(30)]
# The second base shares eight tokens with the first, the third none.
BASES = [_FIRST, _FIRST[:8] + _FIRST[20:], [_RANDOM.randrange(VOCAB_SIZE) for _ in range(30)]]
MAX_TICKS = 4000


class Job:
    """A random request, when it arrives, and when it is aborted."""

    def __init__(self, rng: random.Random, index: int, *, is_crowded: bool) -> None:
        self.index = index
        self.kind = "sampling" if is_crowded else rng.choice(["sampling", "sampling", "sampling", "beam", "pooling"])
        self.n = rng.choice([1, 1, 2, 3])
        self.max_tokens = 14 if is_crowded else rng.randint(1, 12)
        self.min_tokens = min(rng.randint(0, 4), self.max_tokens)
        self.arrival = rng.randint(1, 20 if is_crowded else 25)
        self.abort_at = rng.randint(1, 40) if rng.random() < 0.4 and not is_crowded else None
        self.aborts_in_flight = rng.random() < 0.5
        self.fails_after = rng.choice([None, None, None, None, 0, 1, 2, 3, 5, 8])
        """Generated tokens when no further one can be chosen."""
        self.prompt = BASES[rng.randrange(3)][: rng.randint(0, 22)]
        self.prompt = self.prompt + rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 6))
        self.max_tokens = min(self.max_tokens, MAX_MODEL_LEN - len(self.prompt))
        self._fields = {
            "arrival_time_s": float(self.arrival),
            "deadline_time_s": (None, self.arrival + 5.0, self.arrival + 2.0)[self.index % 3],
            "priority": rng.randint(0, 2),
            "client_id": "abc"[self.index % 3],
            "hash_extras": (rng.choice(["", "", "salt"]),),
            "reads_prefix_cache": rng.random() < 0.75,
            "eos_token_ids": frozenset({0}) if rng.random() < 0.5 else frozenset(),
        }

    def request(self) -> Request:
        leader = self.member(f"r{self.index}", self.index)
        if self.kind == "sampling":
            leader.siblings = [self.member(f"r{self.index}.{at}", self.index + 100 * at) for at in range(1, self.n)]
        return leader

    def member(self, name: str, seed: int) -> Request:
        sampling, pooling = None, PoolingParams()
        if self.kind != "pooling":
            sampling = SamplingParams(
                n=self.n, max_tokens=self.max_tokens, min_tokens=self.min_tokens, stop_token_ids=[1]
            )
        pooling = None if sampling else pooling
        spec = RequestSpec(
            name, list(self.prompt), sampling, pooling, max_tokens=self.max_tokens, seed=seed, **self._fields
        )
        return Request(spec, awaits_external_token=self.kind == "beam")


def random_groups(rng: random.Random, block_size: int) -> tuple[CacheGroup, ...]:
    """Full attention and windows, or a hybrid model."""
    if rng.random() < 0.5:
        return make_groups(rng.choice([(None,), (None,), (6,), (None, 5), (3, 9), (1,), (None, 7, None)]))
    interval = block_size * rng.choice([1, 2, 3])
    kinds: list[CacheSpec] = [
        PagedKV(1, 1, 1), PagedKV(1, 1, 1, window=rng.choice([1, 3, 7])), LatentKV(2, 1, 1),
        RecurrentState(8, interval), RecurrentState(16, interval),
    ]  # fmt: skip
    return tuple(CacheGroup((index,), spec) for index, spec in enumerate(rng.sample(kinds, rng.randint(1, 5))))


def random_config(rng: random.Random, *, is_crowded: bool) -> SchedulerConfig:
    """`is_crowded`: long decodes under priority in few blocks, where a victim often already has its share."""
    chunked = is_crowded or rng.random() < 0.5
    block_size = rng.randint(2, 4) if is_crowded else rng.randint(1, 5)
    groups = random_groups(rng, block_size)
    num_blocks = rng.randint(16, 26) if is_crowded else rng.randint(8, 60)
    return SchedulerConfig(
        max_num_seqs=6 if is_crowded else rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(1, 24) if chunked else MAX_MODEL_LEN,
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        num_blocks=num_blocks * max(1, len(groups) - 1),
        kv_cache_groups=groups,
        enable_prefix_caching=rng.random() < 0.7,
        enable_chunked_prefill=chunked,
        max_num_partial_prefills=rng.randint(1, 3),
        max_long_partial_prefills=rng.randint(1, 2),
        long_prefill_token_threshold=rng.randint(0, 8) if chunked else 0,
        prefill_tokens_per_decode=rng.choice((None, 1, 3)) if chunked else None,
        multi_step_decode=rng.choice([1, 1, 2, 5]),
        max_in_flight=rng.choice([1, 2, 2, 3]),
        policy="priority" if is_crowded else rng.choice(["fcfs", "priority", "sjf", "fair"]),
    )


def fill_disk(driver: Driver, rng: random.Random) -> None:
    """Store blocks as if another run had computed the bases; the scheduler knows of some that are gone."""
    config, tiers = driver.scheduler.config, driver.scheduler.blocks.tiers
    size = config.block_size
    for tokens, extra in itertools.product(BASES, ("", "salt")):
        chain = PrefixChain((extra,))
        chain.extend(tokens[: len(tokens) // size * size], size)
        for (at, digest), (index, group) in itertools.product(
            enumerate(chain.digests), enumerate(config.kv_cache_groups)
        ):
            states = [chain_all(tokens[: position + 1]) for position in range(at * size, (at + 1) * size)]
            content = ([], states[-1:]) if group.spec.is_state else (tokens[at * size : (at + 1) * size], states)
            if rng.random() < 0.95:
                driver.executor.store(index, digest, at, *content)
            tiers.stored.add((index, digest))


class Workload:
    """Adds, aborts, drafts and steps at random; plays the engine's part for beams; checks each token as it comes."""

    def __init__(self, seed: int, counts: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.counts = counts
        is_crowded = seed % 4 == 0
        tier_rng = random.Random(seed)
        tiers = {"num_host_blocks": tier_rng.choice([0, 3, 100]), "max_disk_bytes": tier_rng.choice([0, 1])}
        if is_crowded:
            tiers |= {"num_host_blocks": tier_rng.choice([6, 100]), "max_disk_bytes": 0, "enable_prefix_caching": True}
        num_stages = 1 + (seed % 7 == 3)
        self.config = replace(random_config(rng, is_crowded=is_crowded), pipeline_stages=num_stages, **tiers)
        self.jobs = [Job(rng, index, is_crowded=is_crowded) for index in range(rng.randint(1, 9))]
        self.losses = {rng.randint(1, 60) for _ in range(rng.choice([0, 0, 1, 4]))}
        self.draft_share = rng.choice([0.0, 0.3, 0.9])
        if self.config.pipeline_stages > 1 and any(group.spec.is_state for group in self.config.kv_cache_groups):
            self.draft_share = 0.0  # the fake cannot tell which blocks are free when a state was taken back
        self.events = EventLog(1_000_000)
        self.driver = Driver(self.config, Scheduler(self.config, self.events), vocab_size=VOCAB_SIZE)
        self.driver.executor.fails = self._fails
        self.driver.executor.num_disk_steps = lambda: tier_rng.randint(1, 3)
        if self.config.max_disk_bytes:
            fill_disk(self.driver, tier_rng)
        self.scheduler = self.driver.scheduler
        self.suspects: list[tuple[Request, int]] = []
        self.accepted: dict[str, Request] = {}
        self.alone: dict[str, list[int]] = {}
        self.ended: Counter[str] = Counter()
        self.num_checked: Counter[str] = Counter()
        self.beams: dict[int, dict[str, int | None]] = {}

    def run(self) -> None:
        for tick in range(1, MAX_TICKS):
            self._arrivals(tick)
            self._abort(job for job in self.jobs if job.abort_at == tick and not job.aborts_in_flight)
            self._submit()
            if tick in self.losses:
                self._lose_steps(tick)
            self._abort(job for job in self.jobs if job.abort_at == tick and job.aborts_in_flight)
            if self.driver.in_flight:
                for update in self.driver.collect():
                    self._check(update)
            self._advance_beams()
            self._give_back()
            if tick > 40 and not self.scheduler.has_unfinished and not self.driver.in_flight:
                return
        raise AssertionError(f"{list(self.accepted)} not finished after {MAX_TICKS} ticks")

    def check_end(self) -> None:
        assert set(self.ended) == set(self.accepted)
        assert set(self.ended.values()) <= {1}
        assert Counter(item.request_id for item in self.events.of(EventKind.FINISH)) == self.ended
        assert self.driver.all_blocks_are_home
        for name, expected in self.alone.items():
            request = self.accepted[name]
            whole = request.status not in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
            found = request.output_token_ids
            assert found == (expected if whole else expected[: len(found)])
        self.counts.update(item.kind.value for item in self.events)
        for event in self.events.of(EventKind.FETCHED):
            self.counts["tokens from disk"] += event.data["num_disk_tokens"]
            self.counts["tokens from host"] += event.data["num_host_tokens"]
        self.counts["steps"] += self.driver.executor.num_steps
        num_cached = sum(request.num_cached_tokens for request in self.accepted.values())
        has_states = any(group.spec.is_state for group in self.config.kv_cache_groups)
        self.counts["cached tokens of states" if has_states else "cached tokens"] += num_cached

    def _submit(self) -> None:
        alone = self._alone()
        if alone is not None:
            if not self.driver.in_flight:
                self.driver.submit(alone)
            return
        depth = self.rng.randint(1, self.config.max_in_flight)
        while len(self.driver.in_flight) < depth:
            self._set_drafts()
            output = self.driver.submit()
            if not output.scheduled:
                return
            self.counts["in flight together"] += len(self.driver.in_flight) > 1
            if output.scheduled:
                self.counts["overtaken while blocks come"] += self.scheduler.blocks.tiers.is_fetching
            for item in output.scheduled:
                self.counts["several tokens"] += item.max_new_tokens > 1 and not item.draft_token_ids
                self.counts["drafts"] += bool(item.draft_token_ids)

    def _set_drafts(self) -> None:
        for name, expected in self.alone.items():
            request = self.scheduler.get(name)
            if request is not None and self.rng.random() < self.draft_share:
                start = len(request.output_token_ids)
                drafts = expected[start : start + self.rng.randint(1, 5)]
                drafts += self.rng.choices(range(VOCAB_SIZE), k=self.rng.choice([0, 0, 2]))
                if drafts and self.rng.random() < 0.5:
                    drafts[self.rng.randrange(len(drafts))] = self.rng.randrange(VOCAB_SIZE)
                request.draft_token_ids = tuple(drafts)

    def _fails(self, request_id: str, num_tokens: int) -> bool:
        job = self.jobs[int(re.findall(r"\d+", request_id)[0])]
        is_bad = job.kind == "sampling" and job.fails_after is not None
        return is_bad and num_tokens == len(job.prompt) + job.fails_after

    def _lose_steps(self, tick: int) -> None:
        if not self.driver.in_flight:
            return
        lost = self.driver.in_flight[0]
        assert self.driver.lose_steps(is_executed=tick % 2 == 0) == []
        assert self.scheduler.num_running == 0
        found = [self.scheduler.get(item.request_id) for item in lost.scheduled]
        self.suspects = [(request, request.num_tokens) for request in found if request is not None][:3]
        self.counts["lost"] += 1

    def _alone(self) -> str | None:
        """Return the first suspect that lives and has not yet computed what it had."""
        while self.suspects and not self.driver.in_flight:
            request, num_tokens = self.suspects[0]
            if self.scheduler.get(request.request_id) is request and request.num_computed_tokens < num_tokens:
                return request.request_id
            self.suspects.pop(0)
        return None

    def _arrivals(self, tick: int) -> None:
        for job in self.jobs:
            if job.arrival == tick and job.n <= self.config.max_num_seqs:
                request = job.request()
                members = [request, *request.siblings]
                try:
                    self.driver.add(request)
                except CapacityError:
                    continue
                self.accepted |= {item.request_id: item for item in members}
                if job.kind == "beam":
                    self.beams[job.index] = {request.request_id: None}
                elif job.kind == "sampling":
                    self.alone |= {item.request_id: run_alone(item, MAX_MODEL_LEN, VOCAB_SIZE) for item in members}

    def _abort(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            ids = [f"r{job.index}", f"r{job.index}.1"] if job.index not in self.beams else self.beams.pop(job.index)
            self._note_ended(self.scheduler.abort(list(ids)))
            check_integrity(self.scheduler)

    def _give_back(self) -> None:
        """Give back the unused blocks of idle requests, as after rejected drafts."""
        blocks = self.scheduler.blocks
        for idle in self.scheduler.requests.running:
            if not idle.num_in_flight and self.rng.random() < 0.3:
                num_free = blocks.num_free
                assert blocks.truncate(idle, idle.num_computed_tokens) == idle.num_computed_tokens
                self.counts["given back"] += blocks.num_free - num_free
                check_integrity(self.scheduler)

    def _note_ended(self, requests: list[Request]) -> None:
        self.ended.update(request.request_id for request in requests)

    def _check(self, update: SequenceUpdate) -> None:
        request, result = update.request, update.result
        if request.status.is_finished:
            self._note_ended([request])
            self.counts["stopped"] += request.status is RequestStatus.FINISHED_STOPPED
        name = request.request_id
        if name in self.alone:
            start = self.num_checked[name]
            self.num_checked[name] += len(update.new_token_ids)
            assert list(update.new_token_ids) == self.alone[name][start : self.num_checked[name]]
            self.counts["accepted drafts"] += len(update.new_token_ids) > 1
            self.counts["restored states"] += 0 <= update.num_computed_tokens < request.num_tokens - 1
        elif request.awaits_external_token:
            assert update.new_token_ids == ()
            known = request.prompt_token_ids + request.output_token_ids
            assert result.token_ids == (token_after(chain_all(known), request.spec.seed, VOCAB_SIZE),)
            for beams in self.beams.values():
                if name in beams:
                    assert beams[name] is None, "sampled twice at one position"
                    beams[name] = result.token_ids[0]

    def _advance_beams(self) -> None:
        """Continue the beams of a job, as beam search does, once all have reported: some fork, the worst ends."""
        scheduler = self.scheduler
        for index, beams in list(self.beams.items()):
            if any(token_id is None for token_id in beams.values()):
                continue
            job = self.jobs[index]
            going_on: dict[str, int | None] = {}
            for request_id, token_id in list(beams.items()):
                request = scheduler.get(request_id)
                assert request is not None
                assert token_id is not None
                if len(request.output_token_ids) + 1 >= min(job.max_tokens, MAX_MODEL_LEN - request.num_prompt_tokens):
                    self._note_ended(scheduler.finish(request_id, RequestStatus.FINISHED_LENGTH))
                    continue
                if len(beams) + len(going_on) < 2 * job.n:
                    child = job.member(f"{request_id}+{len(request.output_token_ids)}", job.index)
                    scheduler.fork(request_id, child)
                    self.counts["forks"] += 1
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
        check_integrity(scheduler)


def test_random_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Prompts here are as long as the smallest share of a step that prompts get.
    monkeypatch.setattr(pace, "MIN_STEP_TOKENS", 2)
    counts: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        workload = Workload(seed, counts)
        try:
            workload.run()
            workload.check_end()
        except Exception as error:
            raise AssertionError(f"workload {seed}: {workload.config}") from error
    # Against a generator that has gone dull: everything that can happen does.
    wanted = (
        "preempt", "copy", "share", "evict", "finish", "in flight together", "several tokens", "drafts",
        "accepted drafts", "stopped", "lost", "forks", "cached tokens", "cached tokens of states", "offload", "fetch",
        "tokens from disk", "overtaken while blocks come",
    )  # fmt: skip
    assert min(counts[name] for name in wanted) > NUM_WORKLOADS / 5, counts
    assert min(counts["restored states"], counts["given back"]) > NUM_WORKLOADS / 10, counts
    assert counts["tokens from host"] > NUM_WORKLOADS / 20, counts
