"""Nouns that cross folders, without tensors: requests, schedules, results; and the rules that end a sequence.

The path of one token: `RequestSpec` (what a caller asks) → `Request` (the scheduler's record, `scheduler/request.py`) →
`SchedulerOutput` (one step's work) → executor → `StepResult` (the tokens it yields) → `RequestOutput` (the caller's,
`outputs.py`). Specs, steps and results hold only integers, floats, strings and tuples: they can be recorded, replayed
and sent to another process.
Next to read: `scheduler/request.py`, `scheduler/scheduler.py`.
"""

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from quire.adapter import Adapter
from quire.events import OpTime
from quire.sampling_params import PoolingParams, SamplingParams
from quire.transfers import Transfer, TransferReport

NULL_BLOCK_ID = 0
"""Block 0 holds no request's keys: block tables point to it where a sliding window left a block."""


class RequestStatus(enum.Enum):
    """State of a request. Each accepted request ends in exactly one of the FINISHED states."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, word: str) -> None:
        self.is_finished = word not in ("waiting", "running", "preempted")
        """True if no more tokens will come."""
        self.finish_reason = word if self.is_finished else None
        """OpenAI's word for a finished status; None while unfinished."""


class RequestSpec(msgspec.Struct, frozen=True, array_like=True):
    """Request of a caller for one sequence, checked. Fields beyond the obvious:

    sampling: None for a pooling request, which finishes when its prompt is computed.
    deadline_time_s: by which it must be complete; the engine then ends it. Of the same clock as `arrival_time_s`.
    hash_extras: prefix blocks are shared only among requests with the same extras: cache salt, adapter's content.
    checked_grammar: that of the structured output, as a `GrammarChecker` made it; None: it has not been checked.
    reads_prefix_cache: False if every prompt position must be computed (prompt_logprobs, mean pooling).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams | None
    pooling: PoolingParams | None = None
    max_tokens: int = 16
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    arrival_time_s: float = 0.0
    deadline_time_s: float | None = None
    priority: int = 0
    client_id: str = ""
    hash_extras: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    checked_grammar: str | None = None
    reads_prefix_cache: bool = True
    adapter: Adapter | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)


class Stop(NamedTuple):
    """The end of a sequence after the first `num_tokens` new tokens; `reason` is the stop token's id, if it is one."""

    num_tokens: int
    status: RequestStatus
    reason: int | None = None


def find_stop(
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
    max_tokens: int,
    num_output_tokens: int,
    new_token_ids: Sequence[int],
) -> Stop | None:
    """Return the first stop among `new_token_ids`, which follow `num_output_tokens` generated tokens.

    At each token: EOS, then stop tokens, then length. Before `min_tokens` only length ends a sequence. The engine finds
    stop strings, in the text. The worker ends a step by these rules, the scheduler a request.
    """
    for num_tokens, token_id in enumerate(new_token_ids, 1):
        num_output_tokens += 1
        if num_output_tokens >= sampling.min_tokens:
            if token_id in eos_token_ids and not sampling.ignore_eos:
                return Stop(num_tokens, RequestStatus.FINISHED_STOPPED)
            if sampling.stop_token_ids and token_id in sampling.stop_token_ids:
                return Stop(num_tokens, RequestStatus.FINISHED_STOPPED, token_id)
        if num_output_tokens >= max_tokens:
            return Stop(num_tokens, RequestStatus.FINISHED_LENGTH)
    return None


# --- One step ---------------------------------------------------------------------------------


class BlockTableUpdate(msgspec.Struct, frozen=True):
    """For one request and group: entries from `start` on are now `block_ids`, and the table ends there.

    An append has `start` = old length; copy-on-write replaces the last entry; a window that moved on rewrites entries
    with NULL_BLOCK_ID. An unchanged table has `block_ids == ()` and `start` = its length.
    """

    start: int
    block_ids: tuple[int, ...]


class NewRequest(msgspec.Struct, frozen=True):
    """Everything that the executor must know of a request that is new to it, or returns after preemption."""

    request_id: str
    token_ids: tuple[int, ...]  # all tokens known: prompt, then tokens generated before a preemption
    num_prompt_tokens: int
    sampling: SamplingParams | None
    pooling: PoolingParams | None
    eos_token_ids: tuple[int, ...]
    seed: int
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int = 16  # most tokens to generate, in the context length too
    awaits_external_token: bool = False  # the scheduler sends the next token, not the executor
    mirostat_mu: float | None = None  # see `Request`
    adapter: Adapter | None = None


class ScheduledRequest(msgspec.Struct, frozen=True):
    """A request's share of a step: `num_tokens` tokens from position `num_computed_tokens` on are computed.

    The executor remembers the tokens that it yields, so a step may be scheduled before steps in flight have yielded its
    input tokens. It verifies the drafts, which are the last of the `num_tokens`. Fields:
        num_tokens: 0 for a sibling in the step that forks it: it samples from the row of `logits_from`, its leader,
            with its own seed.
        max_new_tokens: the most tokens that this step may yield: 0 for a partial prefill, 1 for a decode, 1 + drafts
            when it verifies, more when it may decode several times. Their blocks are in the table. The executor decodes
            several times if all requests of the step may, until a sequence ends or it must end the step early.
        new_token_ids: tokens appended to the request that the executor did not yield (beam search).
        block_table_updates: one per KV cache group.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    max_new_tokens: int
    new_token_ids: tuple[int, ...]
    block_table_updates: tuple[BlockTableUpdate, ...]
    logits_from: str | None = None
    draft_token_ids: tuple[int, ...] = ()


class SchedulerOutput(msgspec.Struct, frozen=True):
    """The work of one step. Self-contained: replaying the same outputs in order gives the same tokens."""

    step_id: int
    new_requests: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    transfers: tuple[Transfer, ...]
    preempted_ids: tuple[str, ...]  # forget these, before anything else: they come back as `new_requests`
    finished_ids: tuple[str, ...]
    """Forget these, before anything else: they finished or were aborted. An id may be forgotten and new in one step."""
    forgets_all: bool = False  # forget every request and every step submitted before: a step was lost
    times_ops: bool = False  # the result has `op_times`, those of the first pass
    awaits_transfers: bool = False
    """No request can run before a transfer has ended: the step waits for some, but not long."""
    num_draft_tokens: int = 0  # the most tokens that the executor's draft model guesses behind this step's

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the first forward pass."""
        return sum([item.num_tokens for item in self.scheduled])

    @property
    def has_prompts(self) -> bool:
        """True if a request computes more than one known token."""
        return any(item.num_tokens - len(item.draft_token_ids) > 1 for item in self.scheduled)

    def with_op_times(self) -> "SchedulerOutput":
        """Return the same step with `times_ops`."""
        return msgspec.structs.replace(self, times_ops=True)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: the token itself first, then the likeliest others, best first.

    `ranks` are 1-based and counted over the whole vocabulary."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


class Draft(msgspec.Struct, frozen=True):
    """Guessed tokens, and per token the estimated probability that it is right if those before it are."""

    token_ids: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()


class RequestResult(msgspec.Struct, frozen=True):
    """The result of one step for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """Tokens that the step yields: one, those of several decode iterations, or the accepted drafts and one more."""
    logprobs: tuple[TokenLogprobs, ...] = ()  # per token; empty if not asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For prompt positions this step made known, in order. Position 0 has none."""
    embedding: tuple[float, ...] | None = None
    error: str | None = None
    """Reason why this request must end after these tokens, while other requests go on; the code is a caller's."""
    error_code: str | None = None
    draft: Draft | None = None  # a guess of the tokens behind `token_ids`: a draft model's, or what a grammar leaves
    mirostat_mu: float | None = None  # behind `token_ids`; see `Request`


class StepResult(msgspec.Struct, frozen=True):
    """The results of one step, in the order of `SchedulerOutput.scheduled`; requests without any result are absent."""

    step_id: int
    results: tuple[RequestResult, ...]
    is_lost: bool = False
    """The executor raised: this step and all later ones are lost. `results` hold only requests at fault."""
    num_iterations: int = 1  # forward passes, for events and `Pace`
    op_times: tuple[OpTime, ...] = ()  # time and work of each instruction that ran, where these are traced
    transfers: TransferReport | None = None
    draft_s: float = 0.0  # in which a draft model guessed tokens
