"""`ModelRunner.run`: one step from `SchedulerOutput` to `StepResult`. One of the engine's three choke points.

It decides nothing: what to compute is in the schedule, what to draw in the sampler, the record of each request in
`RequestStates`. Prompt logprobs and pooling read the same hidden states as sampling.
Next to read: `batch.py`, `forward.py`, then `sampling/sampler.py`.
"""

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.config import STEP_S, EngineConfig
from quire.memory_plan import PROMPT_LOGPROB_ROWS
from quire.runtime.batch import RequestState, RequestStates, StepLayout, Yield, drop_rows, lay_out
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.forward import Forward
from quire.sampling.sampler import Sampler
from quire.sampling.state import Sampled, SamplingState
from quire.sampling_params import PoolingParams
from quire.types import Draft, RequestResult, ScheduledRequest, SchedulerOutput, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from quire.runtime.adapter_pool import AdapterPool
    from quire.runtime.drafter import Drafter

logger = logging.getLogger("quire.runtime")
_BAD_EMBEDDING = (
    "the embedding holds NaN or infinity: the model overflowed (try dtype='float32')"
    " or its weights are damaged (`quire rm`, then `quire pull`)"
)


class ModelRunner:
    """Runs steps of one model on one device. Owns the request states; forward, cache and sampler are given to it.

    Attributes: `limit_s` ends the running step after its current decode iteration, if another would exceed it;
    `max_in_flight`: steps that may be launched before the oldest one is finished.
    """

    max_in_flight = 1

    def __init__(
        self,
        config: EngineConfig,
        forward: Forward,
        cache: CacheEngine,
        sampler: Sampler,
        *,
        states: RequestStates | None = None,
        classifier: NDArray[np.float32] | None = None,
        adapters: "AdapterPool | None" = None,
        drafter: "Drafter | None" = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """`states`: those that a drafter reads. `classifier`: the classification head [labels, E] of a model that has
        one. `drafter`: guesses the tokens behind a step's. `agree`: returns what all ranks of the model do, if there
        are several: they must decode equally often, and compute the same rows of logits.
        """
        self.classifier = classifier
        self.forward = forward
        self.cache = cache
        self.sampler = sampler
        self.states = RequestStates.of(config.scheduler) if states is None else states
        self.limit_s = STEP_S
        self.drafter, self._adapters, self._agree = drafter, adapters, agree
        self._gives_drafts = config.speculative != "off"
        self._ends_early = False

    def end_early(self) -> None:
        """End the running step, or the next one, after its current decode iteration. For any thread."""
        self._ends_early = True

    def launch(self, output: SchedulerOutput) -> Any:
        """Begin a step, and return what `finish` takes. On a CPU it is the step: `finish` computes all."""
        return output

    def finish(self, launched: Any) -> StepResult:
        """Return the result of the oldest launched step."""
        return self.run(launched)

    def run(self, output: SchedulerOutput) -> StepResult:
        """Compute one step: request changes, transfers, forward, sampling, prompt logprobs, pooling; then further
        decode iterations, if the schedule allows them."""
        try:
            states = self._begin(output)
            return self._compute(output, lay_out(output, states)) if output.num_tokens else self._idle(output)
        finally:
            self._ends_early = False

    def _begin(self, output: SchedulerOutput) -> list[RequestState]:
        """Apply request changes and transfers. Returns the records of the scheduled requests."""
        states = self.states.apply(output)
        for new in output.new_requests:
            self.states[new.request_id].sampling = self.sampler.start(new)
        if self._adapters is not None:
            self._adapters.follow(output, self.states)
        if output.forgets_all:
            self.cache.forget_transfers()
        if output.transfers:
            self.cache.transfer(output.transfers, may_wait=output.awaits_transfers)
        if self.drafter is not None:
            self.drafter.begin_step(output)
        return states

    def _idle(self, output: SchedulerOutput) -> StepResult:
        """Return the result of a step that computes nothing."""
        return StepResult(output.step_id, (), transfers=self.cache.report(waits=output.awaits_transfers))

    def _compute(self, output: SchedulerOutput, layout: StepLayout) -> StepResult:
        started = time.monotonic()
        self.forward.times_ops = output.times_ops
        first_rows = range(len(layout.sampled)) if layout.logit_index is None else layout.logit_index
        yields = [
            Yield(state, sampling, first_row, item.draft_token_ids)
            for (item, state, sampling), first_row in zip(layout.sampled, first_rows, strict=True)
        ]
        self._iterate(layout, yields)
        prompt_logprobs, embeddings = self._read_prompts(layout)
        self.forward.times_ops = False  # times are those of one pass
        num_iterations = 1
        most = min([item.max_new_tokens - len(item.draft_token_ids) for item in output.scheduled])
        while num_iterations < most:
            is_late = (time.monotonic() - started) * (num_iterations + 1) > self.limit_s * num_iterations
            goes_on = not (self._ends_early or is_late or any(map(self._ends_step, yields)))
            if not (goes_on if self._agree is None else self._agree(goes_on)):
                break
            layout = layout.of_next_iteration()
            self._iterate(layout, yields)
            num_iterations += 1
        drafts, draft_s = self._guess(output, yields)
        results = []
        of_request = iter(yields)
        for item in output.scheduled:
            request_id = item.request_id
            of_prompt, embedding = prompt_logprobs.get(request_id, ()), embeddings.get(request_id)
            if item.max_new_tokens:
                taken = next(of_request)
                draft = taken.forced_draft() if self._gives_drafts else None
                results.append(taken.result(of_prompt, draft or drafts.get(request_id)))
            elif embedding is not None and not math.isfinite(sum(embedding)):
                results.append(RequestResult(request_id, error=_BAD_EMBEDDING))
            elif of_prompt or embedding is not None:
                results.append(RequestResult(request_id, prompt_logprobs=of_prompt, embedding=embedding))
        if self._adapters is not None:
            results = self._adapters.refuse(output, results)
        op_times = self.forward.take_op_times()
        logger.debug(
            "step %d: %d rows, %d requests, %d sample, %d iterations, %.2f ms",
            output.step_id,
            output.num_tokens,
            len(output.scheduled),
            len(yields),
            num_iterations,
            1e3 * (time.monotonic() - started),
        )
        return StepResult(
            output.step_id,
            tuple(results),
            num_iterations=num_iterations,
            op_times=op_times,
            transfers=self.cache.report(),
            draft_s=draft_s,
        )

    def _iterate(self, layout: StepLayout, yields: list[Yield]) -> None:
        """Compute and sample one token of each request, or those behind right drafts. Mutates: yields, states."""
        self._sample(layout, yields, self._forward(layout))
        if self.drafter is not None:
            self.drafter.follow(layout, self.forward)

    def _guess(self, output: SchedulerOutput, yields: list[Yield]) -> tuple[dict[str, Draft], float]:
        """Return the draft model's guesses of the next tokens, by request, and the seconds that they took."""
        if self.drafter is None or not output.num_draft_tokens:
            return {}, 0.0
        started = time.monotonic()
        states = [taken.state for taken in yields if not taken.ends]
        drafts = self.drafter.propose(states, output.num_draft_tokens)
        return drafts, time.monotonic() - started

    def _ends_step(self, taken: Yield) -> bool:
        """Return True if the sequence ends, or the next step can take several forced tokens at once."""
        return taken.ends or (self._gives_drafts and bool(taken.forced))

    def _forward(self, layout: StepLayout) -> list[int | None] | None:
        """Compute hidden states; returns the likeliest token per logit row, if no request wants more."""
        is_greedy = all(sampling.num_tokens >= sampling.greedy_from for _, _, sampling in layout.sampled)
        return self.forward.run(layout, self.states, only_likeliest=is_greedy)

    def _sample(self, layout: StepLayout, yields: list[Yield], likeliest: list[int | None] | None) -> None:
        """Sample the next token of each request, then the token after each right draft. Mutates: yields, states.

        A draft is right if it equals the sampled token. The row behind it is sampled after the request's sampling
        state has taken it up, so penalties, grammars and seeds act as in steps of one token each.
        """
        if not yields:
            return
        logits, sample = None, self.sampler.sample
        if likeliest is None:
            logit_rows = self._take_forced(layout, yields)
            gives_shares = self.forward.gives_shares  # never with one rank
            if gives_shares and self.sampler.takes_shares([taken.sampling for taken in yields]):
                logits, sample = self.forward.shares(logit_rows), self.sampler.sample_shares
            else:
                logits = self.forward.logits(logit_rows)
        active, num_accepted = yields, 0
        while active:
            if likeliest is not None:
                sampled: list[Sampled] = [(likeliest[taken.first_row + num_accepted], None) for taken in active]
            else:
                assert logits is not None
                rows = logits
                if num_accepted or layout.logit_index is not None:
                    index = [taken.first_row + num_accepted for taken in active]
                    rows = logits[index]
                sampled = sample(rows, [taken.sampling for taken in active])
            for taken, (token_id, logprobs) in zip(active, sampled, strict=True):
                self._take(taken, token_id, logprobs)
            active = [
                taken
                for taken in active
                if num_accepted < len(taken.draft_token_ids)
                and not taken.has_failed
                and taken.draft_token_ids[num_accepted] == taken.token_ids[-1]
            ]
            num_accepted += 1

    def _take_forced(self, layout: StepLayout, yields: list[Yield]) -> NDArray[np.int32]:
        """Take drafts that a grammar forces, and return the rows whose logits are needed. Mutates: yields, states."""
        if self._agree is not None:  # only rank 0 has the grammars
            return layout.logit_rows
        num_forced = 0
        for taken in yields:
            for token_id in taken.split_forced():
                num_forced += 1
                self._take(taken, token_id, None)
        return drop_rows(yields, layout.logit_rows) if num_forced else layout.logit_rows

    def _take(self, taken: Yield, token_id: int | None, logprobs: TokenLogprobs | None) -> None:
        if token_id is None:
            taken.has_failed = True
            return
        taken.token_ids.append(token_id)
        if logprobs is not None:
            taken.logprobs.append(logprobs)
        if not taken.state.new.awaits_external_token:
            self.states.append(taken.state, token_id)

    def _read_prompts(
        self, layout: StepLayout
    ) -> tuple[dict[str, tuple[TokenLogprobs, ...]], dict[str, tuple[float, ...]]]:
        """Return prompt logprobs and embeddings of the requests that want them and computed prompt tokens now."""
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        embeddings: dict[str, tuple[float, ...]] = {}
        for (item, state), first_row in zip(layout.computed, layout.first_rows, strict=True):
            new = state.new
            if item.num_computed_tokens >= new.num_prompt_tokens:
                continue
            if new.pooling is not None:
                rows = self.forward.hidden(first_row, first_row + item.num_tokens)
                pooled = _pool(state, item.num_computed_tokens, rows)
                if pooled is not None:
                    vector = self._finish_pooling(new.pooling, pooled, first_row + item.num_tokens - 1)
                    embeddings[item.request_id] = tuple(vector.tolist())
            elif state.sampling is not None and state.sampling.params.prompt_logprobs is not None:
                prompt_logprobs[item.request_id] = self._prompt_logprobs(state, state.sampling, item, first_row)
        return prompt_logprobs, embeddings

    def _finish_pooling(self, params: PoolingParams, pooled: NDArray[np.float32], last_row: int) -> NDArray[np.float32]:
        """Return what `params.task` asks for. Shapes: pooled [E] -> [E], [labels] or [token_ids]."""
        if params.task == "token_logits":
            logits: Any = self.forward.logits(np.array([last_row], np.int32))[0]
            return np.array([float(logits[token_id]) for token_id in params.token_ids], np.float32)
        if params.task == "classify":
            assert self.classifier is not None
            return self.classifier @ pooled
        return pooled / max(np.linalg.norm(pooled), np.float32(1e-12)) if params.normalize else pooled

    def _prompt_logprobs(
        self, state: RequestState, sampling: SamplingState, item: ScheduledRequest, first_row: int
    ) -> tuple[TokenLogprobs, ...]:
        """Return logprobs of the prompt tokens that follow a chunk's: its last predicts the next chunk's first."""
        start = item.num_computed_tokens
        # The last prompt token predicts a generated one, which is the sampler's.
        count = min(start + item.num_tokens, state.new.num_prompt_tokens - 1) - start
        found: list[TokenLogprobs] = []
        for first in range(0, count, PROMPT_LOGPROB_ROWS):
            last = min(first + PROMPT_LOGPROB_ROWS, count)
            logits = self.forward.logits(np.arange(first_row + first, first_row + last, dtype=np.int32))
            following = self.states.tokens[state.row, start + first + 1 : start + last + 1]
            found.extend(self.sampler.prompt_logprobs(logits, following.tolist(), sampling))
        return tuple(found)


def _pool(state: RequestState, start: int, hidden: Any) -> NDArray[np.float32] | None:
    """Return the pooled vector once the prompt is complete; None before. Mutates: state.

    last: h[P-1]; mean: (h[0] + … + h[P-1]) / P.
    Shapes: hidden [T, E] of positions start …, an array or a tensor -> [E].
    """
    new = state.new
    assert new.pooling is not None
    values: NDArray[np.float32] = hidden if isinstance(hidden, np.ndarray) else hidden.cpu().numpy()
    complete = start + len(values) >= new.num_prompt_tokens
    if new.pooling.pooling == "mean":
        # In fp64, where sums of so few fp32 values lose nothing: else the last bits would depend on the chunks.
        total = values.sum(axis=0, dtype=np.float64)
        if state.hidden_sum is not None and start > 0:
            total += state.hidden_sum
        state.hidden_sum = total
        pooled = (total / new.num_prompt_tokens).astype(np.float32)
    else:
        pooled = values[-1]
    return pooled if complete else None
