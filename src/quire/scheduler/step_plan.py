"""`StepPlan`: one step while it is being decided. Requests can still be taken out of it.

Next to read: `scheduler.py`, which fills it, and `executor_view.py`, which turns it into a `SchedulerOutput`.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.config import SchedulerConfig
from quire.types import Request, Transfer

MIN_STEP_TOKENS = 12
"""A step that has prompts may take so many tokens with those of the requests that generate: two groups of rows of a
CPU's products, which take little longer than one row."""


class Admission(enum.Enum):
    """Whether a waiting request may start in this step."""

    ADMITTED = enum.auto()
    OVERTAKEN = enum.auto()  # others may go first: only the number of long prompts is in the way
    BLOCKED = enum.auto()  # nobody may go first: or a big request would wait for ever


@dataclass(slots=True)
class Share:
    """What one request gets of a step.

    catches_up: all known tokens are computed after this step; then the request samples.
    """

    request: Request
    num_tokens: int
    catches_up: bool
    transfers: tuple[Transfer, ...] = ()
    logits_from: str | None = None


class StepPlan:
    """The token budget left, and who has been given how much of it.

    A prompt is partial if it goes on after this step. The counts of partial prompts and of reserved blocks are only
    read for admission, which does not happen in a step that preempts; so `remove` leaves them alone.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._num_partial = 0
        self._num_long_partial = 0
        self._prefill_budget = config.max_num_batched_tokens
        self.budget = config.max_num_batched_tokens
        self.free_seats = 0
        self.shares: dict[str, Share] = {}
        self.num_preempted = 0
        self.num_reserved_blocks = 0
        self.max_rounds = 1

    def limit_prefill(self, running: Iterable[Request], step_tokens: int = 0) -> None:
        """Keep the step short for those who generate in it, if that is wanted; `step_tokens` are short enough."""
        per_decode = self._config.prefill_tokens_per_decode
        if per_decode is not None:
            num_decodes = sum(request.num_tokens - request.num_computed_tokens == 1 for request in running)
            if num_decodes:
                self._prefill_budget = max(max(MIN_STEP_TOKENS, step_tokens) - num_decodes, per_decode * num_decodes)

    def allow_rounds(self, running: Sequence[Request], num_free_blocks: int) -> None:
        """Let all who run get several tokens in this step, if they generate and nobody must leave for it.

        What ends a request by its text is found outside of the step: who has stop strings gets one token at a time,
        so that none is computed in vain. Call only when nobody waits who could start.
        """
        if self._config.max_decode_rounds == 1 or not running or not all(map(_generates, running)):
            return
        longest = self._config.max_model_len
        left = (min(item.max_tokens - len(item.output_token_ids), longest - item.num_tokens) for item in running)
        wanted = min(self._config.max_decode_rounds, *left)
        num_blocks = (wanted // self._config.block_size + 2) * len(self._config.kv_cache_groups) * len(running)
        if num_blocks <= num_free_blocks:
            self.max_rounds = wanted

    def chunk_len(self, num_left: int) -> int:
        """How many of `num_left` tokens a request gets now; 0 where prompts have had their share of the step."""
        threshold = self._config.long_prefill_token_threshold
        given = min(num_left, self.budget, threshold) if threshold else min(num_left, self.budget)
        return given if given <= 1 else min(given, self._prefill_budget)

    def add(self, share: Share) -> None:
        """Give a request its tokens."""
        self.shares[share.request.request_id] = share
        self.budget -= share.num_tokens
        self._prefill_budget -= share.num_tokens if share.num_tokens > 1 else 0

    def remove(self, request_id: str) -> None:
        """Take a preempted request out, with its tokens and copies, if it was in."""
        share = self.shares.pop(request_id, None)
        if share is not None:
            self.budget += share.num_tokens
            self._prefill_budget += share.num_tokens if share.num_tokens > 1 else 0
        self.num_preempted += 1

    def add_partial(self, request: Request, num_missing_blocks: int) -> None:
        """Note a prompt that goes on after this step and will take so many more blocks."""
        self._num_partial += 1
        self._num_long_partial += self._is_long(request)
        self.num_reserved_blocks += num_missing_blocks

    def allows_partial(self) -> bool:
        """Whether another prompt may be left unfinished by this step."""
        return self._config.enable_chunked_prefill and self._num_partial < self._config.max_num_partial_prefills

    def allows_long_partial(self, request: Request) -> bool:
        """Whether this prompt, if long, may be left unfinished beside the other long ones."""
        return not self._is_long(request) or self._num_long_partial < self._config.max_long_partial_prefills

    def _is_long(self, request: Request) -> bool:
        return 0 < self._config.long_prefill_token_threshold < request.num_tokens


def _generates(request: Request) -> bool:
    sampling = request.sampling
    return (
        sampling is not None
        and request.num_tokens - request.num_computed_tokens == 1
        and bool(request.output_token_ids)
        and not request.awaits_external_token
        and not sampling.stop_strings
    )
