"""Runners and samplers of the ranks that share a model: rank 0 decides the tokens of a step, and when it ends.

Every rank runs the same steps with its own `ModelRunner`, on its share of each layer's weights. Partial sums of hidden
states, and the likeliest tokens of each rank, meet in the plan's collectives. Only rank 0 samples, because only rank 0
has the grammars; only rank 0 ends a step, because that depends on the clock and on messages. Ranks of earlier stages
get the tokens with the next step. If every row of a step samples from its `top_k` best logits, each rank sends only its
own best logits of the row.
Next to read: `kernels/collective.py`, `links.py`; `parallel/tensor_parallel.py` for the processes.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.config import EngineConfig
from quire.errors import EngineDeadError
from quire.kernels.collective import RecordingGroup
from quire.layers.group import SINGLE, Group, LocalGroup, share_vocabulary
from quire.lazy_torch import on_meta
from quire.runtime.batch import RequestState, StepLayout
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.forward import Forward
from quire.runtime.links import ONE_RANK, RANK_LOST, Links
from quire.runtime.loader import make_share
from quire.runtime.model_runner import ModelRunner
from quire.sampling.native import NativeRowSampler
from quire.sampling.sampler import Grammars, Sampler
from quire.sampling.state import Sampled, SamplingState
from quire.types import NewRequest, SchedulerOutput, StepResult, TokenLogprobs
from quire.weights.checkpoint import Checkpoint

MAX_BEST = 1024
"""Largest `top_k` for which ranks send their best logits instead of all: a row of keys fits a slot many times."""
KEY_BYTES = 8
NO_TOKEN = -1
"""Sent for a request that gets no token, and ends: its logits leave no choice, or its sampling failed."""


def check_ranks(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Check that the ranks can share the model, before any of them starts. Raises: as `make_share`."""
    if config.options.tensor_parallel_size > 1:
        with on_meta():
            make_share(config, checkpoint, LocalGroup(0, config.options.tensor_parallel_size))


def max_best(num_columns: int) -> int:
    """Return the largest `top_k` for which a rank's best logits are no more bytes than its `num_columns` logits."""
    return min(MAX_BEST, 4 * num_columns // KEY_BYTES)


def make_group(vocab_size: int, exchange: _native.Exchange | None) -> Group:
    """Return the group with which a model is traced."""
    return SINGLE if exchange is None else RecordingGroup(exchange.rank, exchange.num_ranks, vocab_size)


def make_sampler(
    vocab_size: int, device: str, pool: _native.ThreadPool, links: Links, grammars: Grammars | None
) -> Sampler:
    """Return the sampler of a rank, or of the one worker there is."""
    if links == ONE_RANK:
        return Sampler(vocab_size, device, pool, grammars)
    is_leading = links.is_last and not links.place
    return (LeadingSampler if is_leading else FollowingSampler)(vocab_size, device, pool, links, grammars)


def make_runner(
    config: EngineConfig, forward: Forward, cache: CacheEngine, sampler: Sampler, links: Links, **parts: Any
) -> ModelRunner:
    """Return the runner of a rank, or of the one worker there is. `parts`: further arguments of `ModelRunner`."""
    if not links.is_last:
        return StageRunner(config, forward, cache, sampler, **parts)
    agree_on = None if links.place is None else partial(agree, links)
    return ModelRunner(config, forward, cache, sampler, agree=agree_on, **parts)


def agree(links: Links, is_wanted: bool) -> bool:
    """Return rank 0's `is_wanted`, on every rank. Raises: EngineDeadError if a rank is lost."""
    values = np.array([is_wanted], np.int32)
    links.broadcast(values)
    return bool(values[0])


class RankSampler(Sampler):
    """The sampler of one of several ranks.

    The best `top_k` logits of a row are among the best `top_k` of the ranks' shares of the vocabulary. Rank 0 draws the
    same token from these as from the whole row: `RowSampler::sample_best`.
    """

    def __init__(
        self,
        vocab_size: int,
        device: str,
        pool: _native.ThreadPool,
        links: Links,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(vocab_size, device, pool, grammars)
        self._links = links
        self._max_best: int | None = None
        if links.exchange is not None and isinstance(self.rows, NativeRowSampler):
            group = LocalGroup(links.exchange.rank, links.exchange.num_ranks)
            self._share, num_rows = share_vocabulary(vocab_size, group)
            self._max_best = max_best(num_rows)

    def takes_shares(self, states: Sequence[SamplingState]) -> bool:
        """See `Sampler`: if these rows need no other logits than their best, and these are fewer than all."""
        most = self._max_best
        return most is not None and all(
            state.num_tokens >= state.best_from and state.num_best <= most for state in states
        )

    def merge(self, logits: Any, states: Sequence[SamplingState]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Send this rank's largest logits of each row; on rank 0 return those of all ranks, as keys, and their number.

        Shapes: logits [S, columns of a rank]. Raises: EngineDeadError if a rank is lost.
        """
        exchange = self._links.exchange
        assert exchange is not None
        assert isinstance(self.rows, NativeRowSampler)
        sizes = np.array([state.num_best for state in states], np.int64)
        num_keys = sizes * exchange.num_ranks
        keys = np.empty(num_keys.sum() if exchange.rank == 0 else 0, np.uint64)
        if not self.rows.native.merge_best(
            logits.ctypes.data,
            logits.strides[0] // logits.itemsize,
            self._share.size,
            self._share.start,
            sizes.ctypes.data,
            len(sizes),
            exchange,
            keys.ctypes.data,
        ):
            raise EngineDeadError(RANK_LOST)
        return keys, num_keys


class LeadingSampler(RankSampler):
    """The sampler of rank 0, which tells the tokens to all ranks of its stage, if there are others.

    An exception ends the request that it belongs to, with `NO_TOKEN` for the other ranks: they wait for this rank, so a
    step cannot be lost and repeated as with one worker.
    """

    def sample(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """See `Sampler`. Raises: EngineDeadError if a rank is lost."""
        # The native sampler leaves logits as they were, so that rows can be sampled again.
        return self._tell(states, lambda first, end: self.choose(logits[first:end], states[first:end]))

    def sample_shares(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """See `Sampler`. Raises: EngineDeadError if a rank is lost."""
        assert isinstance(self.rows, NativeRowSampler)
        rows = self.rows
        keys, num_keys = self.merge(logits, states)
        starts = [0, *num_keys.cumsum().tolist()]

        def choose(first: int, end: int) -> list[Sampled]:
            ids = rows.sample_best(keys[starts[first] : starts[end]].copy(), num_keys[first:end], states[first:end])
            return [(token_id, None) for token_id in ids]

        return self._tell(states, choose)

    def _tell(self, states: Sequence[SamplingState], choose: Callable[[int, int], list[Sampled]]) -> list[Sampled]:
        """Tell the other ranks the tokens of `choose(first, end)`, which samples some of the rows, and return them."""
        try:
            sampled = choose(0, len(states))
        except Exception:
            sampled = [self._choose_alone(row, state, choose) for row, state in enumerate(states)]
        if self._links.place is not None:
            ids = [NO_TOKEN if token_id is None else token_id for token_id, _ in sampled]
            self._links.broadcast(np.array(ids, np.int32))
        return sampled

    def _choose_alone(self, row: int, state: SamplingState, choose: Callable[[int, int], list[Sampled]]) -> Sampled:
        try:
            return choose(row, row + 1)[0]
        except Exception as error:
            state.fail(error)
            return None, None

    def prompt_logprobs(self, logits: Any, next_token_ids: Sequence[int], state: SamplingState) -> list[TokenLogprobs]:
        """See `Sampler`. After an exception the request ends when its prompt is computed."""
        try:
            return super().prompt_logprobs(logits, next_token_ids, state)
        except Exception as error:
            state.fail(error)
            return []


class FollowingSampler(RankSampler):
    """The sampler of another rank: it has rank 0's tokens, and no log-probabilities, which only rank 0 returns."""

    def start(self, new: NewRequest) -> SamplingState | None:
        """See `Sampler`. The state only counts tokens."""
        return None if new.sampling is None else SamplingState(new, new.sampling, self.vocab_size)

    def sample(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """See `Sampler`. Raises: EngineDeadError if a rank is lost."""
        return self._take(len(states))

    def sample_shares(self, logits: Any, states: Sequence[SamplingState]) -> list[Sampled]:
        """See `Sampler`. Raises: EngineDeadError if a rank is lost."""
        self.merge(logits, states)
        return self._take(len(states))

    def _take(self, num_rows: int) -> list[Sampled]:
        """Return the tokens that rank 0 tells."""
        ids = np.empty(num_rows, np.int32)
        self._links.broadcast(ids)
        return [(None if token_id == NO_TOKEN else token_id, None) for token_id in ids.tolist()]

    def prompt_logprobs(self, logits: Any, next_token_ids: Sequence[int], state: SamplingState) -> list[TokenLogprobs]:
        """Return nothing: see `Sampler` for rank 0's."""
        return []


Yielded = tuple[int, dict[str, tuple[int, ...]]]
"""A step's id and the tokens that it yielded, by request."""


class StageRunner(ModelRunner):
    """The runner of a stage before the last: its layers only. Later steps tell it the tokens that a step yielded."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self._sampled: dict[int, list[RequestState]] = {}

    def take(self, yielded: Iterable[Yielded]) -> None:
        """Append the tokens of earlier steps, but those of requests that were forgotten since."""
        for step_id, token_ids in yielded:
            for state in self._sampled.pop(step_id, ()):
                request_id = state.new.request_id
                if self.states.by_id.get(request_id) is state and not state.new.awaits_external_token:
                    for token_id in token_ids.get(request_id, ()):
                        self.states.append(state, token_id)

    def _compute(self, output: SchedulerOutput, layout: StepLayout) -> StepResult:
        self._sampled[output.step_id] = [state for _, state, _ in layout.sampled]
        self.forward.run(layout, self.states, only_likeliest=False)
        return StepResult(output.step_id, (), transfers=self.cache.report())
