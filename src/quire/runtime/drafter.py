"""`Drafter`: guesses the tokens behind those of a step, in the worker, with a plan of its own.

`ModelDrafter` has a draft model. Its layers' keys and values lie in the same blocks as the model's, as further layers,
so that prefix hits, forks, preemption and tiers hold for both. It follows lazily: only when a step asks for guesses
does it compute the tokens that it has not seen, so that it costs nothing while guesses do not pay. It keeps account of
the full blocks that it has computed, to know what to compute of a prefix hit. A wrong key would make guesses worse, and
outputs the same as ever: `ModelRunner` verifies them.
Next to read: `head_drafter.py`, then `drafts/executor_drafts.py`, which decides how many tokens
are asked for.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.config import SchedulerConfig
from quire.runtime.batch import RequestState, RequestStates, StepLayout
from quire.runtime.links import Links
from quire.runtime.plan.emit import BODY, LOGITS, PlannedModel
from quire.transfers import Tier
from quire.types import NULL_BLOCK_ID, Draft, SchedulerOutput

if TYPE_CHECKING:
    from quire.runtime.forward import Forward

NO_TOKEN = -1
MIN_REACH = 0.15
"""Estimated probability that all guesses so far are right, below which a request's draft ends."""
_NONE: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(slots=True)
class Guesses:
    """The draft of one request while it grows."""

    state: RequestState
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    reach: float = 1.0

    def add(self, token_id: int, probability: float) -> bool:
        """Add a guess; returns whether another one is wanted."""
        if token_id == NO_TOKEN:
            return False
        self.token_ids.append(token_id)
        self.probabilities.append(probability)
        self.reach *= probability
        return self.reach >= MIN_REACH and len(self.token_ids) < self.max_tokens


class Drafter:
    """Base of what guesses. A subclass says by `_first_pass` how it computes what it guesses from.

    `context_len`: longest sequence that it can compute. `shift`: tokens by which its input is ahead of its position.
    """

    shift = 0

    def __init__(self, planned: PlannedModel, states: RequestStates, context_len: int, links: Links) -> None:
        self._planned, self._states, self._links = planned, states, links
        self._context_len = context_len

    def begin_step(self, output: SchedulerOutput) -> None:
        """Note what a step does to blocks and requests, before it is computed."""

    def follow(self, layout: StepLayout, forward: "Forward") -> None:
        """Take up what a forward pass computed, after its tokens were sampled."""

    def propose(self, states: Sequence[RequestState], num_tokens: int) -> dict[str, Draft]:
        """Guess up to `num_tokens` tokens behind the tokens of each request. Returns: the drafts, by request.

        The blocks of these tokens must be in the tables. Mutates: states.
        """
        wanted = []
        for state in states:
            num_useful = state.new.max_tokens - (state.num_tokens - state.new.num_prompt_tokens) - 1
            most = min(num_tokens, num_useful, self._context_len - state.num_tokens)
            if most > 0 and not state.new.awaits_external_token:
                wanted.append(Guesses(state, most))
        active, logit_rows = self._first_pass(wanted)
        drafted, ahead = active, 0
        while active:
            wants_more = [item.add(*guess) for item, guess in zip(active, self._guess(logit_rows), strict=True)]
            kept = np.flatnonzero(wants_more)
            active = [active[index] for index in kept]
            if active:
                for item in active:
                    self._states.tokens[item.state.row, item.state.num_tokens + ahead] = item.token_ids[-1]
                logit_rows = self._next_pass(active, logit_rows[kept], ahead)
            ahead += 1
        for item in drafted:
            item.state.drafted_ids = tuple(item.token_ids[:-1])  # the last one was not computed
        return {item.state.new.request_id: Draft(tuple(item.token_ids), tuple(item.probabilities)) for item in drafted}

    def _first_pass(self, wanted: list[Guesses]) -> tuple[list[Guesses], NDArray[np.int32]]:
        """Compute all known tokens. Returns: the requests that can be guessed, and the last row of each."""
        raise NotImplementedError

    def _next_pass(self, active: list[Guesses], logit_rows: NDArray[np.int32], ahead: int) -> NDArray[np.int32]:
        """Compute the token that was guessed last of each draft, behind `ahead` others. Returns: the row of each.

        `logit_rows`: of the pass before.
        """
        rows = np.array([item.state.row for item in active], np.int32)
        starts = np.array([item.state.num_tokens for item in active], np.int32) + np.int32(ahead - self.shift)
        self._run(rows, starts, np.ones(len(rows), np.int32))
        return np.arange(len(rows), dtype=np.int32)

    def _run(self, rows: NDArray[np.int32], starts: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        tokens = self._states.tokens[:, self.shift :]
        self._planned.run(BODY, rows, starts, counts, _NONE, tokens, self._states.block_tables)

    def _guess(self, logit_rows: NDArray[np.int32]) -> list[tuple[int, float]]:
        """Return the likeliest token of each row, `NO_TOKEN` for none, and its probability."""
        limit, ids, shares = self._planned.limits.max_logit_rows, [], []
        for first in range(0, len(logit_rows), limit):
            some = np.ascontiguousarray(logit_rows[first : first + limit])
            self._planned.run(LOGITS, _NONE, _NONE, _NONE, some, self._states.tokens, self._states.block_tables)
            for logits in self._planned.logits[: len(some)]:
                token_id = int(logits.argmax())
                total = np.exp(logits - logits[token_id]).sum()
                is_number = np.isfinite(total)
                ids.append(token_id if is_number else NO_TOKEN)
                shares.append(1 / float(total) if is_number else 0.0)
        if self._links.place is not None:
            # All ranks must guess the same tokens, as often: rank 0's, whose logits are whole.
            told = np.array([ids, np.array(shares, np.float32).view(np.int32)], np.int32).reshape(-1)
            self._links.broadcast(told)
            ids, shares = told[: len(ids)].tolist(), told[len(ids) :].view(np.float32).tolist()
        return list(zip(ids, shares, strict=True))


class ModelDrafter(Drafter):
    """Guesses with a draft model. A request's `RequestState` keeps how many of its tokens the model has computed.

    Of each block of the device and of the host it keeps whether the model has computed all of it. Blocks from the disk
    count as computed: most prefixes are kept there after requests that were given guesses.
    """

    def __init__(
        self,
        planned: PlannedModel,
        states: RequestStates,
        context_len: int,
        links: Links,
        config: SchedulerConfig,
        layer_indices: Collection[int],
    ) -> None:
        """`layer_indices`: of the draft model."""
        super().__init__(planned, states, context_len, links)
        self._block_size = config.block_size
        # A cache group with layers of the draft model, without a window if there is one.
        groups = enumerate(config.kv_cache_groups)
        of_draft = [
            (group.spec.window is not None, index)
            for index, group in groups
            if not set(group.layer_indices).isdisjoint(layer_indices)
        ]
        self._group = min(of_draft)[1]
        sizes = {Tier.DEVICE: config.num_blocks, Tier.HOST: config.num_host_blocks}
        self._is_whole = {tier: np.zeros(size, np.bool_) for tier, size in sizes.items()}
        self._is_whole[Tier.DEVICE][NULL_BLOCK_ID] = True

    def begin_step(self, output: SchedulerOutput) -> None:
        """Note the blocks that a step fills anew or copies, and what new requests find. Mutates: states."""
        size, tables = self._block_size, self._states.block_tables[self._group]
        on_device = self._is_whole[Tier.DEVICE]
        for move in output.transfers:
            if move.group_index == self._group and move.target_tier is not Tier.DISK:
                known = move.source_tier is not Tier.DISK
                values = self._is_whole[move.source_tier][list(move.source_ids)] if known else True
                self._is_whole[move.target_tier][list(move.target_ids)] = values
        new_ids = {new.request_id for new in output.new_requests}
        for item in output.scheduled:
            state, start = self._states[item.request_id], item.num_computed_tokens
            first, end = -(-start // size), -(-(start + item.num_tokens + item.max_new_tokens) // size)
            on_device[tables[state.row, first:end]] = False
            on_device[NULL_BLOCK_ID] = True
            if item.request_id not in new_ids:
                continue
            if item.logits_from is not None:
                state.num_drafted = self._states[item.logits_from].num_drafted
                continue
            missing = np.flatnonzero(~on_device[tables[state.row, : start // size]])
            state.num_drafted = start if not len(missing) else int(missing[0]) * size

    def _first_pass(self, wanted: list[Guesses]) -> tuple[list[Guesses], NDArray[np.int32]]:
        """See `Drafter`. Requests whose tokens are too many for one pass get no draft until all are computed."""
        for item in wanted:
            self._take_guesses(item.state)
        shares: list[tuple[RequestState, int]] = []
        left, ready = self._planned.limits.max_tokens, []
        for item in sorted(wanted, key=lambda item: item.state.num_tokens - item.state.num_drafted):
            num_missing = item.state.num_tokens - item.state.num_drafted
            if num_missing <= left:
                ready.append(item)
            shares += [(item.state, min(left, num_missing))] * (left > 0)
            left -= min(left, num_missing)
        if not shares:
            return [], _NONE
        counts = np.array([count for _, count in shares], np.int32)
        rows = np.array([state.row for state, _ in shares], np.int32)
        self._run(rows, np.array([state.num_drafted for state, _ in shares], np.int32), counts)
        for state, count in shares:
            self._note(state, state.num_drafted + count)
        return ready, np.cumsum(counts, dtype=np.int32)[: len(ready)] - np.int32(1)

    def _take_guesses(self, state: RequestState) -> None:
        """Count the guesses that became the request's tokens as computed. Its last token always is computed anew."""
        num_drafted = state.num_drafted
        for token_id in state.drafted_ids:
            if num_drafted >= state.num_tokens or self._states.tokens[state.row, num_drafted] != token_id:
                break
            num_drafted += 1
        state.drafted_ids = ()
        self._note(state, min(num_drafted, state.num_tokens - 1))

    def _note(self, state: RequestState, num_drafted: int) -> None:
        """Note that the model has computed a request's tokens up to `num_drafted`."""
        first, end = state.num_drafted // self._block_size, num_drafted // self._block_size
        state.num_drafted = num_drafted
        if end > first:
            self._is_whole[Tier.DEVICE][self._states.block_tables[self._group, state.row, first:end]] = True
