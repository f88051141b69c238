"""`FakeExecutor`: executes `SchedulerOutput`s in pure Python and believes nothing that the scheduler says.

It keeps the content of every KV block: which group and which positions it holds, the token at each, and a running
digest that makes each position depend on all tokens before it, as attention does. The page of a recurrent state holds
the newest digest only. Tokens and digests are read back through the block table, so a block that is shared wrongly,
stale, not copied, or written out of order either raises `FakeExecutorError` or changes the tokens that come out.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.adapter import Adapter
from quire.config import SchedulerConfig
from quire.transfers import Tier, Transfer, TransferReport
from quire.types import (
    NULL_BLOCK_ID,
    NewRequest,
    RequestResult,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
    TokenLogprobs,
)

NextToken = Callable[[str, list[int]], int]
_MASK = (1 << 64) - 1


class FakeExecutorError(AssertionError):
    """The scheduler asked for something that a real executor would compute wrongly."""


def device_copy(group_index: int, source_id: int, target_id: int) -> Transfer:
    """A transfer of one block within the device."""
    return Transfer(group_index, Tier.DEVICE, (source_id,), Tier.DEVICE, (target_id,))


def chain(digest: int, token_id: int) -> int:
    """The digest of a sequence one token longer."""
    digest = ((digest ^ (token_id + 1)) * 0x9E3779B97F4A7C15) & _MASK
    return digest ^ (digest >> 29)


def chain_all(token_ids: Sequence[int]) -> int:
    """The digest of a whole sequence."""
    digest = 1
    for token_id in token_ids:
        digest = chain(digest, token_id)
    return digest


def token_after(digest: int, seed: int, vocab_size: int) -> int:
    """The default next token: a function of all tokens so far and the request's seed."""
    return (chain(digest, seed & _MASK) >> 17) % vocab_size


@dataclass(slots=True)
class _Block:
    """Content of one block: `tokens[i]` is at position `index * block_size + i`. A state: no tokens, one digest."""

    group_index: int
    index: int
    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


@dataclass(slots=True)
class FakeSequence:
    new: NewRequest
    token_ids: list[int]
    tables: list[list[int]]
    num_computed: int = 0
    yielded: list[int] = field(default_factory=list)
    """Of the step that is computed."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: tuple[str, str | None] | None = None
    has_failed: bool = False
    """In a step before: the scheduler did not know it when it scheduled this one."""


class FakeExecutor:
    """An `Executor` without a model and without tensors. A submitted step is computed when it is collected.

    next_token: (request id, all its tokens) → the next one; default: `token_after`.
    """

    def __init__(self, config: SchedulerConfig, *, vocab_size: int = 1000, next_token: NextToken | None = None) -> None:
        self.vocab_size = vocab_size
        self.max_in_flight = config.max_in_flight
        self._num_stages = config.pipeline_stages
        self.is_shut_down = False
        self.num_steps = 0
        self.ends_early = False
        self.num_iterations: Callable[[int], int] = lambda most: 1 + self.num_steps % most
        """Decode iterations of a step that may have `most`."""
        self.fails: Callable[[str, int], bool] = lambda request_id, num_tokens: False
        """Return True if no token can be chosen for a request that has this many."""
        self.unread: set[str] = set()
        """Digests of adapters that are not read yet."""
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._max_tokens = config.max_num_batched_tokens
        self._windows = [group.spec.window for group in config.kv_cache_groups]
        self._is_state = [group.spec.is_state for group in config.kv_cache_groups]
        self._next_token = next_token
        self._submitted: deque[SchedulerOutput] = deque()
        self.host: dict[int, _Block] = {}
        self.disk: dict[tuple[int, bytes], _Block] = {}
        """May be changed by tests: blocks get lost, another run finds them."""
        self.num_disk_steps: Callable[[], int] = lambda: 1
        """Steps that the next read from disk takes."""
        self._reads: list[tuple[int, int, int, bytes]] = []
        """Step in which it ends, target, group, digest."""
        self._blocks: dict[int, _Block] = {}
        self._sequences: dict[str, FakeSequence] = {}
        self._owners: Counter[int] = Counter()
        self._complaint = ""

    @property
    def known_ids(self) -> set[str]:
        """Requests it has been told of and not told to forget."""
        return set(self._sequences)

    def store(self, group_index: int, digest: bytes, index: int, tokens: list[int], digests: list[int]) -> None:
        """Put a block on disk."""
        self.disk[group_index, digest] = _Block(group_index, index, tokens, digests)

    def read_adapters(self, wanted: Sequence[Adapter], wait_s: float) -> set[str]:
        """See `Executor`. Reads end when a test takes them out of `unread`."""
        return {adapter.digest for adapter in wanted} - self.unread

    def submit(self, output: SchedulerOutput) -> None:
        """See `Executor`."""
        if output.forgets_all:
            self._submitted.clear()
        self._need(len(self._submitted) < self.max_in_flight, "too many steps in flight")
        self._submitted.append(output)

    def collect(self) -> StepResult:
        """See `Executor`. Raises: FakeExecutorError."""
        output = self._submitted.popleft()
        self.num_steps += 1
        try:
            return self._execute(output)
        except BaseException:
            self._submitted.clear()
            raise
        finally:
            self.ends_early = False

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Submit and collect one step."""
        self.submit(output)
        return self.collect()

    def end_step_early(self) -> None:
        """See `Executor`."""
        self.ends_early = True

    def shutdown(self) -> None:
        """See `Executor`. Nothing may be executed afterwards."""
        self.is_shut_down = True

    def _execute(self, output: SchedulerOutput) -> StepResult:
        # What was once wrong stays wrong: an engine that tries again must not get away with it.
        self._need(not self._complaint, self._complaint)
        self._need(not self.is_shut_down, "executed after shutdown")
        if output.forgets_all:
            self._need(not output.finished_ids and not output.preempted_ids, "forgets all, and some")
            self._sequences.clear()
            self._owners.clear()
        self._need(output.num_tokens <= self._max_tokens, f"{output.num_tokens} tokens exceed the budget")
        for request_id in (*output.finished_ids, *output.preempted_ids):
            self._need(request_id in self._sequences, f"told to forget '{request_id}', which is not known")
            self._own(self._sequences.pop(request_id), -1)
        transfers = self._copy_blocks(output)
        for new in output.new_requests:
            self._add(new)
        scheduled_ids = [item.request_id for item in output.scheduled]
        self._need(len(set(scheduled_ids)) == len(scheduled_ids), "a request is scheduled twice")
        # Siblings take up their blocks after their leader has written: until then the blocks are the leader's alone.
        new_ids = {new.request_id for new in output.new_requests}
        computed = [item for item in output.scheduled if item.logits_from is None]
        for item in computed:
            self._take_up(item, is_new=item.request_id in new_ids)
        for item in computed:
            self._compute(item)
        for item in output.scheduled:
            if item.logits_from is not None:
                self._take_up(item, is_new=item.request_id in new_ids)
        self._on_computed()
        for item in output.scheduled:
            self._sample(item)
        num_iterations = self._iterate(output.scheduled)
        results = (self._result(item) for item in output.scheduled)
        found = tuple(result for result in results if result is not None)
        return StepResult(output.step_id, found, num_iterations=num_iterations, transfers=transfers)

    def _iterate(self, scheduled: Sequence[ScheduledRequest]) -> int:
        """Decode further tokens of requests that may yield them. Returns the number of forward passes."""
        most = min([item.max_new_tokens - len(item.draft_token_ids) for item in scheduled], default=1)
        num_iterations = max(1, self.num_iterations(max(1, most)))
        for iteration in range(1, num_iterations):
            if self.ends_early or any(self._sequences[item.request_id].error for item in scheduled):
                return iteration
            for item in scheduled:
                sequence = self._sequences[item.request_id]
                self._check_single_writer(sequence, 1)
                self._write(sequence, 1)
                self._choose(sequence, sequence.num_computed)
        return num_iterations

    # --- State ----------------------------------------------------------------------------------

    def _add(self, new: NewRequest) -> None:
        self._need(new.request_id not in self._sequences, f"'{new.request_id}' is new but already known")
        tables: list[list[int]] = [[] for _ in self._windows]
        self._sequences[new.request_id] = FakeSequence(new, list(new.token_ids), tables)

    def _take_up(self, item: ScheduledRequest, *, is_new: bool) -> None:
        request_id = item.request_id
        self._need(request_id in self._sequences, f"'{request_id}' is scheduled but not known")
        sequence = self._sequences[request_id]
        self._need(not item.new_token_ids or sequence.new.awaits_external_token, f"'{request_id}' is sent its tokens")
        sequence.token_ids += item.new_token_ids
        sequence.has_failed |= sequence.error is not None
        sequence.yielded, sequence.logprobs, sequence.error = [], [], None
        self._need(len(item.block_table_updates) == len(self._windows), f"'{request_id}': one update per group")
        self._own(sequence, -1)
        for table, update in zip(sequence.tables, item.block_table_updates, strict=True):
            self._need(update.start <= len(table), f"'{request_id}': update at {update.start} of {len(table)}")
            table[update.start :] = update.block_ids
            self._need(all(0 <= at < self._num_blocks for at in table), f"'{request_id}': no such block in {table}")
        self._own(sequence, +1)
        if sequence.has_failed:
            return
        num_drafts = len(item.draft_token_ids)
        end = item.num_computed_tokens + item.num_tokens - num_drafts
        if any(self._is_state) and item.num_computed_tokens < sequence.num_computed:
            self._take_back(sequence, item.num_computed_tokens)  # to the state before rejected drafts
        self._need(is_new or sequence.num_computed == item.num_computed_tokens, f"'{request_id}': positions skipped")
        self._need(end <= len(sequence.token_ids), f"'{request_id}': tokens up to {end} are not known")
        samples = end == len(sequence.token_ids) and sequence.new.sampling is not None
        is_right = item.max_new_tokens > num_drafts if samples else item.max_new_tokens == num_drafts == 0
        self._need(is_right, f"'{request_id}': max_new_tokens={item.max_new_tokens} at {end}")
        if item.logits_from is None:
            self._need(item.num_tokens > num_drafts, f"'{request_id}' is scheduled without tokens")
        else:
            leader = self._sequences.get(item.logits_from)
            self._need(leader is not None and item.num_tokens == 0 and samples, f"'{request_id}': bad leader")
        sequence.num_computed = item.num_computed_tokens

    def _own(self, sequence: FakeSequence, sign: int) -> None:
        for table in sequence.tables:
            for block_id in table:
                self._owners[block_id] += sign

    def _copy_blocks(self, output: SchedulerOutput) -> TransferReport | None:
        """Move blocks between tiers: all sources are read first. Returns what has come from other tiers."""
        if output.forgets_all:
            self._reads.clear()
        targets: list[int] = []
        moved: list[tuple[dict[int, _Block], int, _Block]] = []
        filled, failed = [], []
        for item in output.transfers:
            if item.target_tier is Tier.DEVICE:
                targets += item.target_ids
            if item.source_tier is Tier.DISK:
                for digest, target_id in zip(item.digests, item.target_ids, strict=True):
                    ends = self.num_steps + self.num_disk_steps() - 1
                    self._reads.append((ends, target_id, item.group_index, digest))
                continue
            sources = self._blocks if item.source_tier is Tier.DEVICE else self.host
            blocks = [sources.get(source_id) for source_id in item.source_ids]
            good = all(block is not None and block.group_index == item.group_index for block in blocks)
            self._need(good, f"nothing to copy: {item}")
            self._need(item.source_tier is Tier.HOST or NULL_BLOCK_ID not in item.source_ids, "null block is copied")
            copies = [_Block(it.group_index, it.index, it.tokens.copy(), it.digests.copy()) for it in blocks if it]
            if item.target_tier is Tier.DISK:
                keys = [(item.group_index, digest) for digest in item.digests]
                self.disk.update(zip(keys, copies, strict=True))
                continue
            memory = self._blocks if item.target_tier is Tier.DEVICE else self.host
            moved += [(memory, at, block) for at, block in zip(item.target_ids, copies, strict=True)]
            if item.source_tier is Tier.HOST:
                filled += item.target_ids
        self._need(len(set(targets)) == len(targets) and NULL_BLOCK_ID not in targets, f"bad targets: {targets}")
        places = [(id(memory), at) for memory, at, _ in moved]
        self._need(len(set(places)) == len(places), "two transfers into one slot")
        for memory, at, block in moved:
            memory[at] = block
        for read in [read for read in self._reads if read[0] <= self.num_steps]:
            self._reads.remove(read)
            _, target_id, *key = read
            found = self.disk.get(tuple(key))
            (failed if found is None else filled).append(target_id)
            if found is not None:
                self._blocks[target_id] = _Block(found.group_index, found.index, found.tokens[:], found.digests[:])
        return TransferReport(tuple(filled), tuple(failed)) if filled or failed else None

    # --- Writing and reading blocks -------------------------------------------------------------

    def _compute(self, item: ScheduledRequest) -> None:
        sequence = self._sequences[item.request_id]
        if sequence.has_failed:
            return
        sequence.token_ids += item.draft_token_ids
        self._check_single_writer(sequence, item.num_tokens)
        self._write(sequence, item.num_tokens)

    def _check_single_writer(self, sequence: FakeSequence, num_tokens: int) -> None:
        name, start = sequence.new.request_id, sequence.num_computed
        for table, is_state in zip(sequence.tables, self._is_state, strict=True):
            last = 0 if is_state else (start + num_tokens - 1) // self._block_size
            for at in range(0 if is_state else start // self._block_size, last + 1):
                self._need(at < len(table) and table[at] != NULL_BLOCK_ID, f"'{name}' has no block {at}")
                owners = self._owners[table[at]] - self._num_behind_drafts(sequence, table[at])
                self._need(owners == 1, f"'{name}' writes block {table[at]} shared by {owners}")

    def _num_behind_drafts(self, writer: FakeSequence, block_id: int) -> int:
        """Count other tables with the block behind rejected drafts: stages may compute others before they are cut."""
        if self._num_stages == 1:
            return 0
        others = [other for other in self._sequences.values() if other is not writer]
        return sum(
            block_id in table[-(-other.num_computed // self._block_size) :]
            for other in others
            for table in other.tables
        )

    def _write(self, sequence: FakeSequence, num_tokens: int) -> None:
        name, start = sequence.new.request_id, sequence.num_computed
        for group_index, table in enumerate(sequence.tables):
            digest = self._digest_before(sequence, group_index, start)
            if self._is_state[group_index]:
                for token_id in sequence.token_ids[start : start + num_tokens]:
                    digest = chain(digest, token_id)
                self._blocks[table[0]] = _Block(group_index, 0, [], [digest])
                continue
            for position in range(start, start + num_tokens):
                index, offset = divmod(position, self._block_size)
                if offset == 0:
                    self._blocks[table[index]] = _Block(group_index, index)
                block = self._blocks[table[index]]
                good = block.group_index == group_index and block.index == index and len(block.tokens) == offset
                if not good:  # the message is long: most steps must not make it
                    self._need(False, f"'{name}' writes position {position} over {block}")
                digest = chain(digest, sequence.token_ids[position])
                block.tokens.append(sequence.token_ids[position])
                block.digests.append(digest)
            self._read(sequence, group_index, start, start + num_tokens)
        sequence.num_computed += num_tokens

    def _take_back(self, sequence: FakeSequence, num_tokens: int) -> None:
        """Forget the KV of rejected drafts: all behind the first `num_tokens` tokens."""
        for table, is_state in zip(sequence.tables, self._is_state, strict=True):
            for index in range(num_tokens // self._block_size, 0 if is_state else len(table)):
                block = self._blocks.get(table[index])
                if block is not None and block.index == index:
                    del block.tokens[max(0, num_tokens - index * self._block_size) :]
                    del block.digests[len(block.tokens) :]
        sequence.num_computed = num_tokens

    def _digest_before(self, sequence: FakeSequence, group_index: int, position: int) -> int:
        if position == 0:
            return 1
        index, offset = divmod(position - 1, self._block_size)
        if self._is_state[group_index] and position == sequence.num_computed:
            index = offset = 0
        elif self._is_state[group_index] or self._windows[group_index] == 1:
            # Nothing is read: the state is behind drafts already, or the layer sees nothing but the token itself.
            return chain_all(sequence.token_ids[:position])
        block = self._blocks.get(sequence.tables[group_index][index])
        self._need(block is not None and len(block.digests) > offset, f"position {position - 1} was never written")
        assert block is not None
        if self._is_state[group_index]:
            expected = chain_all(sequence.token_ids[:position])
            is_right = block.group_index == group_index and not block.tokens and block.digests == [expected]
            self._need(is_right, f"'{sequence.new.request_id}' reads a state of other tokens before {position}")
        return block.digests[offset]

    def _read(self, sequence: FakeSequence, group_index: int, first: int, end: int) -> None:
        """Check every position that the tokens `first` … `end - 1` attend to."""
        window = self._windows[group_index]
        start = 0 if window is None else max(0, first - window + 1)
        table = sequence.tables[group_index]
        for index in range(start // self._block_size, -(-end // self._block_size)):
            block = self._blocks.get(table[index])
            where = f"'{sequence.new.request_id}' group {group_index} block {table[index]} at {index}"
            self._need(table[index] != NULL_BLOCK_ID and block is not None, f"{where} holds nothing")
            assert block is not None
            if block.group_index != group_index or block.index != index:
                self._need(False, f"{where} is another's: {block}")
            stop = min(end, (index + 1) * self._block_size)
            expected = sequence.token_ids[index * self._block_size : stop]
            self._need(block.tokens[: len(expected)] == expected, f"{where}: {block.tokens} is not {expected}")

    # --- Results --------------------------------------------------------------------------------

    def _sample(self, item: ScheduledRequest) -> None:
        """Choose the next token, and further ones while the drafts are right."""
        sequence = self._sequences[item.request_id]
        if sequence.has_failed:
            return
        drafts = list(item.draft_token_ids)
        num_known = item.num_computed_tokens + item.num_tokens - len(drafts)
        if item.max_new_tokens:
            del sequence.token_ids[num_known:]
            for draft in (*drafts, None):
                reader = sequence if item.logits_from is None else self._sequences[item.logits_from]
                self._choose(sequence, num_known + len(sequence.yielded), reader)
                if sequence.error is not None or sequence.yielded[-1] != draft:
                    break
            if drafts:
                self._take_back(sequence, num_known + max(0, len(sequence.yielded) - 1))
        else:
            sequence.error = self._failure(sequence) if num_known == len(sequence.token_ids) else None

    def _choose(self, sequence: FakeSequence, end: int, reader: FakeSequence | None = None) -> None:
        """Yield the token that follows the first `end` computed ones."""
        digest = self._final_digest(reader or sequence, end)
        sequence.error = self._failure(sequence)
        if sequence.error is not None:
            return
        known, sampling = sequence.token_ids, sequence.new.sampling
        assert sampling is not None
        token_id = self._token(sequence, digest)
        if sampling.logprobs is not None:
            sequence.logprobs.append(self._logprobs(known, token_id, sampling.logprobs))
        sequence.yielded.append(token_id)
        if not sequence.new.awaits_external_token:
            known.append(token_id)

    def _result(self, item: ScheduledRequest) -> RequestResult | None:
        sequence = self._sequences[item.request_id]
        sampling, known = sequence.new.sampling, sequence.token_ids
        if sequence.has_failed:
            return None
        if sequence.error is not None:
            error, code = sequence.error
            return RequestResult(
                item.request_id, tuple(sequence.yielded), tuple(sequence.logprobs), error=error, error_code=code
            )
        end = item.num_computed_tokens + item.num_tokens
        if sampling is None:
            if end < len(known) or sequence.new.pooling is None:
                return None
            return RequestResult(
                item.request_id, embedding=self._embedding(sequence, self._final_digest(sequence, end))
            )
        prompt_logprobs: list[TokenLogprobs] = []
        if sampling.prompt_logprobs is not None:
            for at in range(item.num_computed_tokens + 1, min(end + 1, sequence.new.num_prompt_tokens)):
                prompt_logprobs.append(self._logprobs(known[:at], known[at], sampling.prompt_logprobs))
        if not sequence.yielded and not prompt_logprobs:
            return None
        return RequestResult(item.request_id, tuple(sequence.yielded), tuple(sequence.logprobs), tuple(prompt_logprobs))

    # --- To be overridden -----------------------------------------------------------------------

    def _on_computed(self) -> None:
        """Called in each step before the first token is sampled."""

    def _failure(self, sequence: FakeSequence) -> tuple[str, str | None] | None:
        """Error and code of a request that can get no token or embedding now."""
        return ("it fails here", None) if self.fails(sequence.new.request_id, len(sequence.token_ids)) else None

    def _token(self, sequence: FakeSequence, digest: int) -> int:
        if self._next_token is not None:
            return self._next_token(sequence.new.request_id, list(sequence.token_ids))
        return token_after(digest, sequence.new.seed, self.vocab_size)

    def _embedding(self, sequence: FakeSequence, digest: int) -> tuple[float, ...]:
        return tuple(float(digest >> at & 255) for at in (0, 8, 16, 24))

    def _logprobs(self, known: list[int], token_id: int, num: int) -> TokenLogprobs:
        """The token first, then the likeliest: the fake prefers the token and those that follow it."""
        count = self.vocab_size - 1 if num < 0 else min(num, self.vocab_size - 1)
        token_ids = tuple((token_id + at) % self.vocab_size for at in range(count + 1))
        return TokenLogprobs(token_ids, tuple(-0.5 - at for at in range(count + 1)), tuple(range(1, count + 2)))

    def _final_digest(self, sequence: FakeSequence, end: int) -> int:
        digests = {self._digest_before(sequence, group_index, end) for group_index in range(len(self._windows))}
        self._need(len(digests) == 1, f"groups disagree on '{sequence.new.request_id}'")
        return digests.pop()

    def _need(self, condition: bool, message: str) -> None:
        if not condition:
            self._complaint = message
            raise FakeExecutorError(f"step {self.num_steps}: {message}")
