"""Hybrid models (full attention, windows, latent, recurrent state) in random schedules, with memory that is kept.

`Pages` holds the content of every page and checks each read of a step: a block that is shared wrongly, stale, not
copied or given back too early makes a read differ. No tensors.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence

import pytest

from quire.cache_spec import CacheGroup, CacheSpec, LatentKV, PagedKV, RecurrentState
from quire.config import SchedulerConfig
from quire.errors import CapacityError
from quire.events import EventKind, EventLog
from quire.scheduler.blocks import BlockManager
from quire.scheduler.scheduler import Scheduler
from quire.types import NewRequest, Request, RequestResult, SchedulerOutput, StepResult, Transfer
from tests.scheduler.builders import make_config, make_request
from tests.scheduler.integrity import check_blocks, check_integrity

VOCAB_SIZE = 6
MAX_MODEL_LEN = 48
STATE = RecurrentState(8, checkpoint_interval=8)
NUM_SCHEDULES = 100
BASES = [[random.Random(seed).randrange(VOCAB_SIZE) for _ in range(30)] for seed in range(2)]


class Pages:
    """Content of the pool: per page what was written at each offset, or the state that replaced all of it."""

    def __init__(self, specs: Sequence[CacheSpec], block_size: int) -> None:
        self.specs = specs
        self.block_size = block_size
        self.content: dict[int, dict[object, object]] = {}
        self.num_reads = 0

    def transfer(self, transfers: Sequence[Transfer]) -> None:
        read = [dict(self.content[source]) for item in transfers for source in item.source_ids]
        targets = [target for item in transfers for target in item.target_ids]
        assert len(set(targets)) == len(targets)
        self.content.update(zip(targets, read, strict=True))

    def write(self, tables: Sequence[Sequence[int]], tokens: list[int], start: int, end: int) -> None:
        """Compute positions start … end - 1 in all layers. States are read here: they are replaced at once."""
        for index, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if spec.is_state:
                if start:
                    self._check(table[0], "state", (index, hash(tuple(tokens[:start]))))
                self.content[table[0]] = {"state": (index, hash(tuple(tokens[:end])))}
                continue
            for position in range(start, end):
                page = self.content.setdefault(table[position // self.block_size], {})
                page.pop("state", None)
                page[position % self.block_size] = (index, position, tokens[position])

    def read(self, tables: Sequence[Sequence[int]], tokens: list[int], start: int, end: int) -> None:
        """Check every entry that tokens start … end - 1 attend to."""
        for index, (spec, table) in enumerate(zip(self.specs, tables, strict=True)):
            if spec.is_state:
                self._check(table[0], "state", (index, hash(tuple(tokens[:end]))))
                continue
            for position in range(0 if spec.window is None else max(0, start - spec.window + 1), end):
                block_id, offset = table[position // self.block_size], position % self.block_size
                self._check(block_id, offset, (index, position, tokens[position]))

    def _check(self, block_id: int, key: object, expected: object) -> None:
        self.num_reads += 1
        found = self.content.get(block_id, {}).get(key)
        assert block_id != 0, "the null block is read"
        assert found == expected, f"page {block_id} holds {found}, not {expected}"


class HybridExecutor:
    """Executes schedules on `Pages`: verifies drafts, and decodes several times where it may."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.pages = Pages([group.spec for group in config.kv_cache_groups], config.block_size)
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, NewRequest] = {}
        self.tables: dict[str, list[list[int]]] = {}

    def execute(self, output: SchedulerOutput, rng: random.Random) -> StepResult:
        for request_id in (*output.finished_ids, *output.preempted_ids):
            del self.tokens[request_id], self.tables[request_id]
        self.pages.transfer(output.transfers)
        for new in output.new_requests:
            self.tokens[new.request_id], self.requests[new.request_id] = list(new.token_ids), new
            self.tables[new.request_id] = [[] for _ in self.pages.specs]
        for item in output.scheduled:
            self.tokens[item.request_id] += item.new_token_ids
            for table, update in zip(self.tables[item.request_id], item.block_table_updates, strict=True):
                table[update.start :] = update.block_ids
        yielded: dict[str, list[int]] = {item.request_id: [] for item in output.scheduled if item.max_new_tokens}
        shares = [
            (item.request_id, item.num_computed_tokens, item.num_tokens, item.draft_token_ids)
            for item in output.scheduled
        ]
        self._compute(shares, yielded)
        iterates = all(item.max_new_tokens > 1 and not item.draft_token_ids for item in output.scheduled)
        for _ in range(rng.randrange(min(item.max_new_tokens for item in output.scheduled)) if iterates else 0):
            if any(len(tokens) == self._last_len(name) for name, tokens in self.tokens.items() if name in yielded):
                break
            shares = [(name, start + count, 1, ()) for name, start, count, _ in shares]
            self._compute(shares, yielded)
        results = tuple(RequestResult(name, tuple(token_ids)) for name, token_ids in yielded.items())
        return StepResult(output.step_id, results)

    def _compute(self, shares: list[tuple[str, int, int, tuple[int, ...]]], yielded: dict[str, list[int]]) -> None:
        for compute in (self.pages.write, self.pages.read):
            for name, start, count, drafts in shares:
                if count:
                    compute(self.tables[name], [*self.tokens[name], *drafts], start, start + count)
        for name, _, _, drafts in shares:
            for draft in (*drafts, None) if name in yielded else ():
                token_id = next_token(self.tokens[name], self.requests[name].seed)
                self.tokens[name].append(token_id)
                yielded[name].append(token_id)
                if draft != token_id:
                    break

    def _last_len(self, name: str) -> int:
        return self.requests[name].num_prompt_tokens + self.requests[name].max_tokens


def next_token(tokens: list[int], seed: int) -> int:
    return hash((seed, *tokens)) % VOCAB_SIZE


def random_groups(rng: random.Random, block_size: int) -> tuple[CacheGroup, ...]:
    interval = block_size * rng.choice([1, 2, 3])
    kinds: list[CacheSpec] = [
        PagedKV(1, 1, 1), PagedKV(1, 1, 1, window=rng.choice([1, 3, 7])), LatentKV(2, 1, 1),
        RecurrentState(8, interval), RecurrentState(16, interval),
    ]  # fmt: skip
    chosen = rng.sample(kinds, rng.choice([1, 2, 3, 4, 5]))
    return tuple(CacheGroup((index,), spec) for index, spec in enumerate(chosen))


def random_config(rng: random.Random) -> SchedulerConfig:
    block_size = rng.choice([1, 2, 3, 4])
    groups = random_groups(rng, block_size)
    return make_config(
        max_num_seqs=rng.randrange(2, 8),
        max_num_batched_tokens=rng.choice([4, 9, 30, MAX_MODEL_LEN]),
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        num_blocks=6 + len(groups) * rng.choice([40, 44, 60]) // block_size,
        kv_cache_groups=groups,
        max_num_partial_prefills=rng.randrange(1, 3),
        multi_step_decode=rng.choice([1, 4]),
        max_in_flight=rng.choice([1, 2, 3]),
        enable_prefix_caching=rng.random() < 0.9,
        policy=rng.choice(["fcfs", "priority"]),
    )


def random_request(rng: random.Random, name: str) -> Request:
    prompt = rng.choice(BASES)[: rng.randrange(24)] + rng.choices(range(VOCAB_SIZE), k=rng.randrange(1, 4))
    return make_request(name, prompt, rng.randrange(1, 20), n=rng.choice([1, 1, 1, 2]), seed=rng.randrange(99),
                        priority=rng.randrange(3), hash_extras=(rng.choice(["", "", "salt"]),))  # fmt: skip


def guess(request: Request, rng: random.Random) -> tuple[int, ...]:
    """Drafts of which the first ones are right."""
    tokens = request.prompt_token_ids + request.output_token_ids
    num_known = len(tokens)
    for _ in range(rng.randrange(4)):
        tokens.append(next_token(tokens, request.seed))
    return (*tokens[num_known:], *rng.choices(range(VOCAB_SIZE), k=rng.randrange(3)))


def run_schedule(seed: int, counts: Counter[str]) -> None:
    """One random schedule to its end: arrivals, aborts at any moment, give-backs of unused blocks."""
    rng = random.Random(seed)
    config = random_config(rng)
    events = EventLog(100_000)
    scheduler, executor = Scheduler(config, events), HybridExecutor(config)
    accepted: list[Request] = []
    waiting = [random_request(rng, f"r{index}") for index in range(7)]
    in_flight: deque[SchedulerOutput] = deque()
    while waiting or scheduler.has_unfinished or in_flight:
        while waiting and rng.random() < 0.7:
            request = waiting.pop()
            try:
                scheduler.add_request(request)
                accepted += [request, *request.siblings]
            except CapacityError:
                counts["refused"] += 1
        for request in accepted:
            if rng.random() < 0.3:
                request.draft_token_ids = guess(request, rng)
        output = scheduler.schedule()
        if output.scheduled:
            in_flight.append(output)
            counts["steps"] += 1
            counts["transfers"] += len(output.transfers)
            counts["drafts"] += sum(len(item.draft_token_ids) for item in output.scheduled)
        if rng.random() < 0.06 and accepted:
            counts["aborted"] += len(scheduler.abort([rng.choice(accepted).request_id]))
            check_integrity(scheduler)
        while in_flight and (len(in_flight) == config.max_in_flight or not output.scheduled or rng.random() < 0.2):
            counts["in flight"] += len(in_flight) > 1
            oldest = in_flight.popleft()
            result = executor.execute(oldest, rng)
            drafted = {item.request_id: len(item.draft_token_ids) for item in oldest.scheduled if item.draft_token_ids}
            counts["rejected"] += sum(len(item.token_ids) <= drafted.get(item.request_id, 0) for item in result.results)
            updates = scheduler.update(oldest, result)
            counts["restored"] += sum(item.num_computed_tokens < item.request.num_tokens - 1 for item in updates
                                      if item.request.request_id in drafted)  # fmt: skip
        for request_id in list(scheduler.blocks.owned):
            idle = scheduler.get(request_id)
            if idle is not None and not idle.num_in_flight and rng.random() < 0.1:
                held = scheduler.blocks.num_free
                assert scheduler.blocks.truncate(request_id, idle.num_computed_tokens) == idle.num_computed_tokens
                counts["given back"] += scheduler.blocks.num_free - held
        check_integrity(scheduler)
        counts["moves"] += 1
        assert counts["moves"] < 4000 * (seed + 1), "no progress"
    assert scheduler.reset_prefix_cache(), "a block did not come home"
    for request in accepted:
        tokens = list(request.prompt_token_ids)
        for token_id in request.output_token_ids:
            assert token_id == next_token(tokens, request.seed)
            tokens.append(token_id)
        assert request.status.finish_reason == "abort" or len(request.output_token_ids) == request.max_tokens
        has_states = any(group.spec.is_state for group in config.kv_cache_groups)
        counts["hits of states" if has_states else "hits"] += request.num_cached_tokens > 0
    counts["preempted"] += len(events.of(EventKind.PREEMPT))
    counts["forked"] += sum("." in request.request_id for request in accepted)
    counts["reads"] += executor.pages.num_reads


def test_random_schedules_of_hybrid_models_read_what_was_written() -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        run_schedule(seed, counts)
    # The generator must reach everything that it is for.
    expected = {
        "hits": 20, "hits of states": 60, "preempted": 25, "forked": 100, "aborted": 100, "given back": 10,
        "transfers": 2600, "steps": 2600, "reads": 130_000, "drafts": 400, "in flight": 1300,
        "rejected": 100, "restored": 30,
    }  # fmt: skip
    assert {name: counts[name] for name, least in expected.items() if counts[name] < least} == {}


STATE_AND_FULL = (CacheGroup((0,), PagedKV(1, 1, 1)), CacheGroup((1,), STATE))


def started(config: SchedulerConfig, num_tokens: int) -> tuple[BlockManager, Request]:
    blocks, request = BlockManager(config), make_request("a", num_tokens)
    blocks.admit(request, blocks.find_prefix(request))
    return blocks, request


def compute(blocks: BlockManager, request: Request, num_tokens: int) -> tuple[Transfer, ...]:
    transfers = blocks.allocate(request, num_tokens)
    assert transfers is not None
    request.num_computed_tokens += num_tokens
    blocks.register(request, request.num_computed_tokens)
    check_blocks(blocks)
    return transfers


def test_checkpoint_is_the_page_that_the_next_step_leaves() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), 20)
    assert blocks.chunk_limit(request, 20) == 8
    assert compute(blocks, request, 8) == ()
    state = blocks.owned["a"].tables[1][0]
    assert blocks.chunk_limit(request, 12) == 8
    (transfer,) = compute(blocks, request, 4)
    assert (transfer.source_ids, transfer.target_ids) == ((state,), tuple(blocks.owned["a"].tables[1]))
    assert compute(blocks, request, 4) == ()
    # The hit ends at the checkpoint, not at the 16 tokens of full attention: those have no checkpoint yet.
    other = make_request("b", request.prompt_token_ids)
    assert blocks.find_prefix(other).num_tokens == 8
    assert blocks.find_prefix(other).tables[1] == [state]


def test_hit_continues_in_a_copy_of_the_checkpoint() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), 20)
    for num_tokens in (8, 8, 4):
        compute(blocks, request, num_tokens)
    blocks.forget("a")
    others = [make_request(name, request.prompt_token_ids) for name in "bc"]
    for other in others:
        hit = blocks.find_prefix(other)
        assert hit.num_tokens == 16
        (checkpoint,) = hit.tables[1]
        other.num_computed_tokens = 16
        blocks.admit(other, hit)
        (transfer,) = [item for item in compute(blocks, other, 4) if item.group_index == 1]
        assert transfer.source_ids == (checkpoint,)
        assert blocks.owned[other.request_id].tables[1] == list(transfer.target_ids) != [checkpoint]


def test_hit_fits_only_if_the_copy_of_its_checkpoint_does() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL, num_blocks=7), 12)
    compute(blocks, request, 8)
    compute(blocks, request, 1)
    blocks.forget("a")
    # Of six pages two hold the blocks of the hit and one its checkpoint.
    for num_tokens, fits in ((16, True), (17, False)):
        other = make_request("b", request.prompt_token_ids[:9] + [1] * (num_tokens - 9))
        assert blocks.find_prefix(other).num_tokens == 8
        assert blocks.fits(other, blocks.find_prefix(other), 0) is fits


def test_pool_without_a_spare_page_makes_no_checkpoint() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL, num_blocks=5), 12)
    compute(blocks, request, 8)
    assert compute(blocks, request, 4) == ()
    assert blocks.num_free == 0


def test_prompts_that_may_not_be_split_have_no_checkpoints() -> None:
    config = make_config(kv_cache_groups=STATE_AND_FULL, enable_chunked_prefill=False, max_num_batched_tokens=256)
    blocks, request = started(config, 20)
    assert blocks.chunk_limit(request, 20) == 20


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_state_returns_to_before_the_step_unless_all_drafts_are_accepted(num_accepted: int) -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), 6)
    compute(blocks, request, 5)
    before = blocks.owned["a"].tables[1][0]
    assert blocks.allocate(request, 3, num_drafts=2) is not None
    assert blocks.owned["a"].tables[1][0] != before
    computed = blocks.truncate("a", 6 + num_accepted)
    assert computed == (8 if num_accepted == 2 else 5)
    assert (blocks.owned["a"].tables[1][0] == before) == (num_accepted < 2)
    request.num_computed_tokens = computed
    blocks.register(request, computed)
    check_blocks(blocks)
    blocks.forget("a")
    assert blocks.reset_prefix_cache()


def test_truncation_behind_cached_tokens_is_refused() -> None:
    blocks, request = started(make_config(), 12)
    compute(blocks, request, 9)
    with pytest.raises(AssertionError, match="are cached"):
        blocks.truncate("a", 7)
    blocks, request = started(make_config(windows=(3,), enable_prefix_caching=False), 12)
    compute(blocks, request, 9)
    compute(blocks, request, 1)
    with pytest.raises(AssertionError, match="a window moved on"):
        blocks.truncate("a", 2)


def test_failed_request_leaves_no_checkpoint() -> None:
    blocks, request = started(make_config(kv_cache_groups=STATE_AND_FULL), 20)
    for num_tokens in (8, 8, 4):
        compute(blocks, request, num_tokens)
    blocks.forget_prefixes("a")
    blocks.forget("a")
    assert blocks.find_prefix(make_request("b", request.prompt_token_ids)).num_tokens == 0
    assert len(blocks.cache) == 0
