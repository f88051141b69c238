"""`ModelRunner.run`: one step from `SchedulerOutput` to `StepResult`. One of the engine's three choke points.

It decides nothing: what to compute is in the schedule, what to draw in the sampler, what a request looks like in
`RequestStates`. Prompt logprobs and pooling read the same hidden states as sampling.
Next to read: `batch.py`, `forward.py`, then `sampling/sampler.py`.
"""

import math
from collections.abc import Callable

import numpy as np
import torch

from quire.config import EngineConfig
from quire.memory_plan import PROMPT_LOGPROB_ROWS
from quire.runtime.batch import StepLayout, lay_out
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.forward import Forward
from quire.runtime.request_states import RequestStates
from quire.sampling.rows import Sampled
from quire.sampling.sampler import Sampler
from quire.types import NewRequest, RequestResult, ScheduledRequest, SchedulerOutput, StepResult, TokenLogprobs

_BAD_EMBEDDING = (
    "the embedding holds NaN or infinity: the model overflowed or its weights are damaged, try dtype='float32'"
)


class ModelRunner:
    """Runs steps of one model on one device. Owns the request states; forward, cache and sampler are given to it.

    Attributes: `ends_step` is asked with the number of rounds computed whether the step shall end with these.
    """

    def __init__(self, config: EngineConfig, forward: Forward, cache: CacheEngine, sampler: Sampler) -> None:
        scheduler = config.scheduler
        self.forward = forward
        self.cache = cache
        self.sampler = sampler
        self.device = torch.device(config.device)
        self.states = RequestStates(
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=scheduler.max_model_len,
            block_size=scheduler.block_size,
            num_groups=len(scheduler.kv_cache_groups),
        )
        self.ends_step: Callable[[int], bool] = lambda num_rounds: False
        self._hidden_sums: dict[str, torch.Tensor] = {}
        """Mean pooling: per request the fp64 sum [E] over the chunks so far."""

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> StepResult:
        """Compute one step: request changes, block copies, forward, sampling, prompt logprobs, pooling; then further
        rounds of forward and sampling, if the schedule allows them."""
        self._update_requests(output)
        if output.transfers:
            self.cache.transfer(output.transfers)
        if not any(item.num_tokens for item in output.scheduled):
            return StepResult(output.step_id, ())
        layout = lay_out(output)
        likeliest = self._forward(layout)
        prompt_logprobs, embeddings = self._read_prompts(layout)
        sampled = self._sample(layout, likeliest)
        results = []
        for item in output.scheduled:
            request_id = item.request_id
            of_prompt = prompt_logprobs.get(request_id, ())
            embedding = embeddings.get(request_id)
            if item.samples:
                results.append(self._result(request_id, sampled[request_id], of_prompt))
            elif embedding is not None and not math.isfinite(sum(embedding)):
                results.append(RequestResult(request_id, error=_BAD_EMBEDDING))
            elif of_prompt or embedding is not None:
                results.append(RequestResult(request_id, prompt_logprobs=of_prompt, embedding=embedding))
        num_rounds = 1
        while num_rounds < output.max_rounds and not self.sampler.ends_any(sampled) and not self.ends_step(num_rounds):
            layout = layout.of_next_round()
            sampled = self._next_round(layout, sampled)
            results += (self._result(request_id, taken) for request_id, taken in sampled.items())
            num_rounds += 1
        op_times = self.forward.take_op_times()
        return StepResult(output.step_id, tuple(results), num_rounds=num_rounds, op_times=op_times)

    def _result(
        self, request_id: str, sampled: Sampled, prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> RequestResult:
        token_id, logprobs = sampled
        if token_id is None:
            error, code = self.sampler.failure(request_id)
            return RequestResult(request_id, error=error, error_code=code)
        return RequestResult(request_id, token_id, logprobs, prompt_logprobs)

    def _next_round(self, layout: StepLayout, sampled: dict[str, Sampled]) -> dict[str, Sampled]:
        for request_id, (token_id, _) in sampled.items():
            assert token_id is not None
            self.states.append(request_id, token_id)
            self.sampler.append_tokens(request_id, (token_id,))
        return self._sample(layout, self._forward(layout))

    def _forward(self, layout: StepLayout) -> list[int | None] | None:
        is_greedy = self.sampler.is_plain_greedy(layout.sampled_ids)
        return self.forward.run(layout, self.states, only_likeliest=is_greedy)

    def _update_requests(self, output: SchedulerOutput) -> None:
        # First, so that whatever is remembered here belongs to a request of the states, also if this step breaks off.
        for request_id in self.states.forgotten_by(output):
            self.sampler.remove_request(request_id)
            self._hidden_sums.pop(request_id, None)
        self.states.apply(output)
        for new in output.new_requests:
            self.sampler.add_request(new)
        for item in output.scheduled:
            if item.new_token_ids:
                self.sampler.append_tokens(item.request_id, item.new_token_ids)

    def _sample(self, layout: StepLayout, likeliest: list[int | None] | None) -> dict[str, Sampled]:
        """Sampled token and logprobs per request. `likeliest`: per logit row, where the forward knows it."""
        if not layout.sampled_ids:
            return {}
        index = layout.logit_index
        if likeliest is not None:
            chosen = likeliest if index is None else [likeliest[row] for row in index]
            return {
                request_id: (token_id, None) for request_id, token_id in zip(layout.sampled_ids, chosen, strict=True)
            }
        logits = self.forward.logits(layout.logit_rows)
        if index is not None:
            logits = logits[torch.tensor(index, device=self.device)]
        return dict(zip(layout.sampled_ids, self.sampler.sample(logits, layout.sampled_ids), strict=True))

    def _read_prompts(
        self, layout: StepLayout
    ) -> tuple[dict[str, tuple[TokenLogprobs, ...]], dict[str, tuple[float, ...]]]:
        """Prompt logprobs and embeddings of the requests that asked for them and computed prompt tokens now."""
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        embeddings: dict[str, tuple[float, ...]] = {}
        for item, first_row in zip(layout.computed, layout.first_rows, strict=True):
            new = self.states[item.request_id].new
            if item.num_computed_tokens >= new.num_prompt_tokens:
                continue
            if new.pooling is not None:
                rows = self.forward.hidden(first_row, first_row + item.num_tokens)
                embedding = self._pool(new, item.num_computed_tokens, rows)
                if embedding is not None:
                    embeddings[item.request_id] = embedding
            elif new.sampling is not None and new.sampling.prompt_logprobs is not None:
                prompt_logprobs[item.request_id] = self._prompt_logprobs(
                    new, new.sampling.prompt_logprobs, item, first_row
                )
        return prompt_logprobs, embeddings

    def _prompt_logprobs(
        self, new: NewRequest, num_logprobs: int, item: ScheduledRequest, first_row: int
    ) -> tuple[TokenLogprobs, ...]:
        """Logprobs of the prompt tokens that follow a chunk's: its last predicts the next chunk's first."""
        start = item.num_computed_tokens
        # The last prompt token predicts a generated one, which is the sampler's.
        count = min(start + item.num_tokens, new.num_prompt_tokens - 1) - start
        found: list[TokenLogprobs] = []
        for first in range(0, count, PROMPT_LOGPROB_ROWS):
            last = min(first + PROMPT_LOGPROB_ROWS, count)
            logits = self.forward.logits(np.arange(first_row + first, first_row + last, dtype=np.int32))
            following = self.states.token_slice(new.request_id, start + first + 1, start + last + 1)
            found.extend(self.sampler.prompt_logprobs(logits, following.tolist(), num_logprobs))
        return tuple(found)

    def _pool(self, new: NewRequest, start: int, hidden: torch.Tensor) -> tuple[float, ...] | None:
        """The embedding once the prompt is complete; None before.

        last: h[P-1]; mean: (h[0] + … + h[P-1]) / P; normalize: divided by its Euclidean length.
        Shapes: hidden [T, E] of positions start …
        """
        assert new.pooling is not None
        complete = start + len(hidden) >= new.num_prompt_tokens
        if new.pooling.pooling == "mean":
            # In fp64, where sums of so few fp32 values lose nothing: else the last bits would depend on the chunks.
            total = hidden.sum(dim=0, dtype=torch.float64)
            if start > 0:
                total += self._hidden_sums[new.request_id]
            self._hidden_sums[new.request_id] = total
            pooled = (total / new.num_prompt_tokens).float()
        else:
            pooled = hidden[-1].float()
        if not complete:
            return None
        if new.pooling.normalize:
            pooled = torch.nn.functional.normalize(pooled, dim=0)
        return tuple(pooled.tolist())
