"""`FakeExecutor`: executes `SchedulerOutput`s in pure Python and believes nothing the scheduler says.

It keeps the content of every KV block: which group and which positions it holds, the token at each, and a running
digest that makes each position depend on all tokens before it, as attention does. Tokens and digests are read back
through the block table, so a block that is shared wrongly, stale, not copied, or written out of order either raises
`FakeExecutorError` or changes the tokens that come out.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.config import SchedulerConfig
from quire.types import (
    NULL_BLOCK_ID,
    BlockTableUpdate,
    NewRequest,
    RequestResult,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
    Tier,
    TokenLogprobs,
    Transfer,
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
    """Content of one block: `tokens[i]` is at position `index * block_size + i`."""

    group_index: int
    index: int
    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    new: NewRequest
    token_ids: list[int]
    tables: list[list[int]]
    num_computed: int = 0


class FakeExecutor:
    """`execute_model` and `shutdown`, like a real executor; no model, no tensors.

    next_token: (request id, all its tokens) → the next one; default: `token_after`.
    """

    def __init__(self, config: SchedulerConfig, *, vocab_size: int = 1000, next_token: NextToken | None = None) -> None:
        self.vocab_size = vocab_size
        self.is_shut_down = False
        self.num_steps = 0
        self.num_rounds: Callable[[SchedulerOutput], int] = lambda output: 1 + self.num_steps % output.max_rounds
        """How many rounds a step has."""
        self.fails: Callable[[str, int], bool] = lambda request_id, num_tokens: False
        """Whether no token can be chosen for a request that has so many."""
        self.ends_step: Callable[[int], bool] = lambda num_rounds: False
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._max_tokens = config.max_num_batched_tokens
        self._windows = [group.spec.window for group in config.kv_cache_groups]
        self._next_token = next_token
        self._blocks: dict[int, _Block] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._owners: Counter[int] = Counter()
        self._complaint = ""

    @property
    def known_ids(self) -> set[str]:
        """Requests it has been told of and not told to forget."""
        return set(self._sequences)

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Compute one step, of as many rounds as it may have or fewer. Raises: FakeExecutorError."""
        self.num_steps += 1
        result = self._execute_round(output)
        num_rounds = 1
        while num_rounds < self.num_rounds(output) and all(item.error is None for item in result.results):
            further = self._execute_round(self._next_round(output, result, num_rounds))
            result = dataclasses.replace(result, results=result.results + further.results)
            num_rounds += 1
        return dataclasses.replace(result, num_rounds=num_rounds)

    def watch(self, ends_step: Callable[[int], bool]) -> None:
        """Kept to be looked at: how many rounds a step has is decided by `num_rounds`."""
        self.ends_step = ends_step

    def _next_round(self, output: SchedulerOutput, result: StepResult, num_done: int) -> SchedulerOutput:
        """The step that a scheduler would have planned next, had it been asked."""
        tokens = {item.request_id: item.token_id for item in result.results}
        scheduled = []
        for item in output.scheduled:
            token_id = tokens[item.request_id]
            self._need(token_id is not None and item.num_tokens == 1, f"'{item.request_id}' has no next round")
            assert token_id is not None
            tables = self._sequences[item.request_id].tables
            scheduled.append(
                ScheduledRequest(
                    item.request_id,
                    item.num_computed_tokens + num_done,
                    1,
                    samples=True,
                    new_token_ids=(token_id,),
                    block_table_updates=tuple(BlockTableUpdate(len(table), ()) for table in tables),
                )
            )
        return SchedulerOutput(output.step_id, (), tuple(scheduled), (), (), ())

    def _execute_round(self, output: SchedulerOutput) -> StepResult:
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
        self._copy_blocks(output)
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
            self._check_single_writer(item)
            self._write(item)
        for item in output.scheduled:
            if item.logits_from is not None:
                self._take_up(item, is_new=item.request_id in new_ids)
        results = (self._result(item) for item in output.scheduled)
        return StepResult(output.step_id, tuple(result for result in results if result is not None))

    def shutdown(self) -> None:
        """Nothing may be executed afterwards."""
        self.is_shut_down = True

    # --- State ----------------------------------------------------------------------------------

    def _add(self, new: NewRequest) -> None:
        self._need(new.request_id not in self._sequences, f"'{new.request_id}' is new but already known")
        tables: list[list[int]] = [[] for _ in self._windows]
        self._sequences[new.request_id] = _Sequence(new, list(new.token_ids), tables)

    def _take_up(self, item: ScheduledRequest, *, is_new: bool) -> None:
        request_id = item.request_id
        self._need(request_id in self._sequences, f"'{request_id}' is scheduled but not known")
        sequence = self._sequences[request_id]
        sequence.token_ids += item.new_token_ids
        self._need(len(item.block_table_updates) == len(self._windows), f"'{request_id}': one update per group")
        self._own(sequence, -1)
        for table, update in zip(sequence.tables, item.block_table_updates, strict=True):
            self._need(update.start <= len(table), f"'{request_id}': update at {update.start} of {len(table)}")
            table[update.start :] = update.block_ids
            self._need(all(0 <= at < self._num_blocks for at in table), f"'{request_id}': no such block in {table}")
        self._own(sequence, +1)
        end = item.num_computed_tokens + item.num_tokens
        self._need(is_new or sequence.num_computed == item.num_computed_tokens, f"'{request_id}': positions skipped")
        self._need(end <= len(sequence.token_ids), f"'{request_id}': tokens up to {end} are not known")
        catches_up = end == len(sequence.token_ids)
        samples = catches_up and sequence.new.sampling is not None
        self._need(item.samples == samples, f"'{request_id}': samples={item.samples} at {end}")
        if item.logits_from is None:
            self._need(item.num_tokens > 0, f"'{request_id}' is scheduled without tokens")
        else:
            leader = self._sequences.get(item.logits_from)
            self._need(leader is not None and item.num_tokens == 0 and item.samples, f"'{request_id}': bad leader")
        sequence.num_computed = end

    def _own(self, sequence: _Sequence, sign: int) -> None:
        for table in sequence.tables:
            for block_id in table:
                self._owners[block_id] += sign

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        copies = [
            (item.group_index, source_id, target_id)
            for item in output.transfers
            for source_id, target_id in zip(item.source_ids, item.target_ids, strict=True)
        ]
        targets = [target_id for _, _, target_id in copies]
        self._need(len(set(targets)) == len(targets), f"two copies into one block: {targets}")
        for group_index, source_id, target_id in copies:
            source = self._blocks.get(source_id)
            self._need(NULL_BLOCK_ID not in (source_id, target_id), "the null block is copied")
            self._need(source is not None and source.group_index == group_index, f"nothing to copy from {source_id}")
            assert source is not None
            self._blocks[target_id] = _Block(
                source.group_index, source.index, source.tokens.copy(), source.digests.copy()
            )

    # --- Writing and reading blocks -------------------------------------------------------------

    def _check_single_writer(self, item: ScheduledRequest) -> None:
        first = item.num_computed_tokens // self._block_size
        last = (item.num_computed_tokens + item.num_tokens - 1) // self._block_size
        for table in self._sequences[item.request_id].tables:
            for at in range(first, last + 1):
                self._need(at < len(table) and table[at] != NULL_BLOCK_ID, f"'{item.request_id}' has no block {at}")
                owners = self._owners[table[at]]
                self._need(owners == 1, f"'{item.request_id}' writes block {table[at]} shared by {owners}")

    def _write(self, item: ScheduledRequest) -> None:
        sequence = self._sequences[item.request_id]
        for group_index, table in enumerate(sequence.tables):
            digest = self._digest_before(sequence, group_index, item.num_computed_tokens)
            for position in range(item.num_computed_tokens, item.num_computed_tokens + item.num_tokens):
                index, offset = divmod(position, self._block_size)
                if offset == 0:
                    self._blocks[table[index]] = _Block(group_index, index)
                block = self._blocks[table[index]]
                good = block.group_index == group_index and block.index == index and len(block.tokens) == offset
                self._need(good, f"'{item.request_id}' writes position {position} over {block}")
                digest = chain(digest, sequence.token_ids[position])
                block.tokens.append(sequence.token_ids[position])
                block.digests.append(digest)
            self._read(sequence, group_index, item)

    def _digest_before(self, sequence: _Sequence, group_index: int, position: int) -> int:
        if position == 0:
            return 1
        index, offset = divmod(position - 1, self._block_size)
        if self._windows[group_index] == 1:
            return chain_all(sequence.token_ids[:position])  # such a layer sees nothing but the token itself
        block = self._blocks.get(sequence.tables[group_index][index])
        self._need(block is not None and len(block.digests) > offset, f"position {position - 1} was never written")
        assert block is not None
        return block.digests[offset]

    def _read(self, sequence: _Sequence, group_index: int, item: ScheduledRequest) -> None:
        """Check every position that this step's tokens attend to."""
        window = self._windows[group_index]
        start = 0 if window is None else max(0, item.num_computed_tokens - window + 1)
        end = item.num_computed_tokens + item.num_tokens
        table = sequence.tables[group_index]
        for index in range(start // self._block_size, -(-end // self._block_size)):
            block = self._blocks.get(table[index])
            where = f"'{item.request_id}' group {group_index} block {table[index]} at {index}"
            self._need(table[index] != NULL_BLOCK_ID and block is not None, f"{where} holds nothing")
            assert block is not None
            self._need(block.group_index == group_index and block.index == index, f"{where} is another's: {block}")
            stop = min(end, (index + 1) * self._block_size)
            expected = sequence.token_ids[index * self._block_size : stop]
            self._need(block.tokens[: len(expected)] == expected, f"{where}: {block.tokens} is not {expected}")

    # --- Results --------------------------------------------------------------------------------

    def _result(self, item: ScheduledRequest) -> RequestResult | None:
        sequence = self._sequences[item.request_id]
        sampling, pooling = sequence.new.sampling, sequence.new.pooling
        end = item.num_computed_tokens + item.num_tokens
        reader = sequence if item.logits_from is None else self._sequences[item.logits_from]
        if sampling is None:
            if end < len(sequence.token_ids) or pooling is None:
                return None
            digest = self._final_digest(reader, end)
            return RequestResult(item.request_id, embedding=tuple(float(digest >> at & 255) for at in (0, 8, 16, 24)))
        token_id = logprobs = None
        prompt_logprobs: list[TokenLogprobs] = []
        if sampling.prompt_logprobs is not None:
            known = range(item.num_computed_tokens + 1, min(end + 1, sequence.new.num_prompt_tokens))
            prompt_logprobs += (self._logprobs(sequence.token_ids[at], sampling.prompt_logprobs) for at in known)
        if item.samples:
            digest = self._final_digest(reader, end)
            if self.fails(item.request_id, len(sequence.token_ids)):
                return RequestResult(item.request_id, error="it fails here")
            if self._next_token is not None:
                token_id = self._next_token(item.request_id, list(sequence.token_ids))
            else:
                token_id = token_after(digest, sequence.new.seed, self.vocab_size)
            if sampling.logprobs is not None:
                logprobs = self._logprobs(token_id, sampling.logprobs)
        if token_id is None and not prompt_logprobs:
            return None
        return RequestResult(item.request_id, token_id, logprobs, tuple(prompt_logprobs))

    def _final_digest(self, sequence: _Sequence, end: int) -> int:
        digests = {self._digest_before(sequence, group_index, end) for group_index in range(len(self._windows))}
        self._need(len(digests) == 1, f"groups disagree on '{sequence.new.request_id}'")
        return digests.pop()

    def _logprobs(self, token_id: int, num: int) -> TokenLogprobs:
        """The token first, then the likeliest: the fake prefers the token and those that follow it."""
        count = self.vocab_size - 1 if num < 0 else min(num, self.vocab_size - 1)
        token_ids = tuple((token_id + at) % self.vocab_size for at in range(count + 1))
        return TokenLogprobs(token_ids, tuple(-0.5 - at for at in range(count + 1)), tuple(range(1, count + 2)))

    def _need(self, condition: bool, message: str) -> None:
        if not condition:
            self._complaint = message
            raise FakeExecutorError(f"step {self.num_steps}: {message}")
