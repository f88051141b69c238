"""`Drafter`: a draft model in the worker, which guesses the tokens behind those of a step.

Its layers' keys and values lie in the same blocks as the model's, as further layers, so that prefix hits, forks,
preemption and tiers hold for both. It follows lazily: only when a step asks for guesses does it compute the tokens that
it has not seen, so that it costs nothing while guesses do not pay. A block that came from the prefix cache counts as
seen. If its first owner was never asked for guesses, guesses behind it are worse, and outputs the same as ever:
`ModelRunner` verifies each guess.
Next to read: `model_runner.py`, then `drafts/executor_drafts.py`, which decides how many tokens are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.config import EngineConfig
from quire.errors import UnsupportedModelError
from quire.kernels.tracing import NotTraceableError
from quire.layers.group import Group
from quire.runtime.batch import RequestState, RequestStates
from quire.runtime.drafted_blocks import DraftedBlocks, draft_group
from quire.runtime.links import Links
from quire.runtime.plan.emit import BODY, LOGITS, PlanLimits, PlannedModel
from quire.runtime.plan.load import load_plan
from quire.types import Draft
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.progress import Progress
from quire.weights.sources import ModelFiles

NO_TOKEN = -1
MIN_REACH = 0.15
"""Estimated probability that all guesses so far are right, below which a request's draft ends."""
_NONE: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Guesses:
    """The draft of one request while it grows."""

    state: RequestState
    max_tokens: int
    token_ids: list[int]
    probabilities: list[float]
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
    """Guesses tokens of requests with a plan of the draft model, several requests at once.

    A request's `RequestState` keeps how many of its tokens the draft model has computed.
    """

    def __init__(
        self, planned: PlannedModel, states: RequestStates, blocks: DraftedBlocks, context_len: int, links: Links
    ) -> None:
        """`context_len`: of the draft model."""
        self.blocks = blocks
        self._planned, self._states, self._links = planned, states, links
        self._context_len = context_len

    def propose(self, states: Sequence[RequestState], num_tokens: int) -> dict[str, Draft]:
        """Guess up to `num_tokens` tokens behind all that each request has. Returns: the drafts, by request.

        The blocks of these tokens must be in the tables. Requests whose tokens are too many for one pass get no draft
        until later calls have computed all of them. Mutates: states.
        """
        wanted = []
        for state in states:
            num_useful = state.new.max_tokens - (state.num_tokens - state.new.num_prompt_tokens) - 1
            most = min(num_tokens, num_useful, self._context_len - state.num_tokens)
            if most > 0 and not state.new.awaits_external_token:
                wanted.append(_Guesses(state, most, [], []))
        active = self._catch_up(wanted)
        counts = [item.state.num_tokens - item.state.num_drafted for item in active]
        starts = [item.state.num_drafted for item in active]
        for item in active:
            self._note(item.state, item.state.num_tokens)
        drafted, ahead = active, 0
        while active:
            rows = np.array([item.state.row for item in active], np.int32)
            self._run(rows, np.array(starts, np.int32), np.array(counts, np.int32))
            last = np.cumsum(counts, dtype=np.int32) - np.int32(1)
            guessed = self._guess(last)
            active = [item for item, guess in zip(active, guessed, strict=True) if item.add(*guess)]
            for item in active:
                position = item.state.num_tokens + ahead
                self._states.tokens[item.state.row, position] = item.token_ids[-1]
            starts, counts = [item.state.num_tokens + ahead for item in active], [1] * len(active)
            ahead += 1
        for item in drafted:
            item.state.drafted_ids = tuple(item.token_ids[:-1])  # the last one was not computed
        return {item.state.new.request_id: Draft(tuple(item.token_ids), tuple(item.probabilities)) for item in drafted}

    def _catch_up(self, wanted: list[_Guesses]) -> list[_Guesses]:
        """Compute tokens behind which no guess is possible in this step. Returns: the requests that can be guessed."""
        left, ready, late = self._planned.limits.max_tokens, [], []
        for item in wanted:
            self._take_guesses(item.state)
        for item in sorted(wanted, key=lambda item: item.state.num_tokens - item.state.num_drafted):
            num_missing = item.state.num_tokens - item.state.num_drafted
            if num_missing <= left:
                ready.append(item)
            elif left:
                late.append((item.state, left))
            left -= min(left, num_missing)
        for state, count in late:
            values = (np.array([value], np.int32) for value in (state.row, state.num_drafted, count))
            self._run(*values)
            self._note(state, state.num_drafted + count)
        return ready

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
        start, state.num_drafted = state.num_drafted, num_drafted
        self.blocks.note(state, start, self._states)

    def _run(self, rows: NDArray[np.int32], starts: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        self._planned.run(BODY, rows, starts, counts, _NONE, self._states.tokens, self._states.block_tables)

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


def load_drafter(
    config: EngineConfig,
    kv_layers: Sequence[_native.KvLayer],
    states: RequestStates,
    pool: _native.ThreadPool,
    group: Group,
    links: Links,
    progress: Progress | None = None,
) -> Drafter:
    """Load the draft model. `kv_layers`: of all layers.

    Raises: ConfigError, ModelFileError; UnsupportedModelError for a model that must run op by op.
    """
    draft = config.model.draft
    assert draft is not None
    files = ModelFiles(str(config.options.draft_model), Path(draft.path), draft.file_kind, "local")
    is_random = config.options.load_format == "dummy"
    checkpoint = Checkpoint(files, draft.model.hf_config) if is_random else open_checkpoint(files)
    own = config.of_draft()
    try:
        program, weights = load_plan(own, checkpoint, own.scheduler.layer_groups, progress, group, 0, links.rank)
    except NotTraceableError as error:
        raise UnsupportedModelError(
            f"draft_model={config.options.draft_model!r} runs as a native plan, and a plan cannot hold {error}: choose"
            " another draft model"
        ) from error
    scheduler = config.scheduler
    limits = PlanLimits(
        max_tokens=scheduler.max_num_batched_tokens, max_requests=scheduler.max_num_seqs,
        max_logit_rows=scheduler.max_num_seqs, tile_rows=own.tile_rows,
        kv_ahead_bytes=config.hardware.kv_ahead_bytes,
    )  # fmt: skip
    planned = PlannedModel(program, weights, kv_layers[config.model.num_layers :], limits, pool, links.exchange)
    layers = range(config.model.num_layers, len(config.model.all_cache_specs))
    blocks = DraftedBlocks(scheduler, draft_group(scheduler, layers))
    return Drafter(planned, states, blocks, draft.model.context_len, links)
