"""Nouns that cross folders, without tensors: requests, schedules, results, outputs.

The path of one token: `Request` (scheduler's view of one sequence) → `SchedulerOutput` (what one step computes) →
executor → `StepResult` (what it computed) → `RequestOutput` (what the caller sees, `outputs.py`). Everything
in a `SchedulerOutput` and a `StepResult` is integers, floats, strings and tuples: it can be recorded, replayed and sent
to another process.
Next to read: `scheduler/scheduler.py`.
"""

import enum
from dataclasses import dataclass, field

from quire.sampling_params import PoolingParams, SamplingParams

NULL_BLOCK_ID = 0
"""Block 0 holds no request's keys: block tables point to it where a sliding window left a block."""


# --- Requests ---------------------------------------------------------------------------------


class RequestStatus(enum.Enum):
    """Where a request is. Each accepted request ends in exactly one of the FINISHED states."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.name.startswith("FINISHED")

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for a finished status; None while unfinished."""
        return self.value if self.is_finished else None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence as the scheduler sees it: tokens known, tokens computed, blocks owned.

    There is no prefill phase and no decode phase: a request is given tokens to compute until
    `num_computed_tokens` catches up with `num_tokens`; the step that catches up samples one more.

    Fields beyond the obvious:
        sampling: None for a pooling request, which finishes when its prompt is computed.
        siblings: the other n - 1 sequences of an `n > 1` request. They wait here, hold no blocks, and are
            forked from this one in the step that completes its prompt.
        awaits_external_token: the next token is chosen outside the sampler (beam search): `update` does not append.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        hash_extras: prefix blocks are shared only among requests with the same extras; the cache salt is one.
        reads_prefix_cache: False where every prompt position must be computed (prompt_logprobs, mean pooling).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams | None
    pooling: PoolingParams | None = None
    max_tokens: int = 16
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    arrival_time_s: float = 0.0
    priority: int = 0
    client_id: str = ""
    hash_extras: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    reads_prefix_cache: bool = True
    awaits_external_token: bool = False
    siblings: list["Request"] = field(default_factory=list)

    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and generated."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions start … stop - 1."""
        prompt_len = len(self.prompt_token_ids)
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : stop - prompt_len]
        if stop <= prompt_len:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt_len]


# --- One step ---------------------------------------------------------------------------------


class Tier(enum.Enum):
    """Memory that holds KV blocks."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies blocks, in all layers of a group, before the step computes. The step reads all sources of all its
    transfers before it writes a target. Copy-on-write is a transfer from device to device.
    """

    group_index: int
    source_tier: Tier
    source_ids: tuple[int, ...]
    target_tier: Tier
    target_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockTableUpdate:
    """For one request and group: entries from `start` on are now `block_ids`, and the table ends there.

    An append has `start` = old length; copy-on-write replaces the last entry; a window that moved on
    rewrites entries with NULL_BLOCK_ID. An unchanged table has `block_ids == ()` and `start` = its length.
    """

    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the executor must know of a request it sees for the first time, or again after preemption."""

    request_id: str
    token_ids: tuple[int, ...]
    """All tokens known: prompt, then tokens generated before a preemption."""
    num_prompt_tokens: int
    sampling: SamplingParams | None
    pooling: PoolingParams | None
    eos_token_ids: tuple[int, ...]
    seed: int
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: the tokens at positions
    `num_computed_tokens … num_computed_tokens + num_tokens - 1` are computed.

    `num_tokens` is 0 for a sibling in the step that forks it: it samples from the row of
    `logits_from`, its leader, with its own seed.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    samples: bool
    new_token_ids: tuple[int, ...]
    """Tokens appended to the request since the executor last heard of it (decode: the one just sampled)."""
    block_table_updates: tuple[BlockTableUpdate, ...]
    """One per KV cache group."""
    logits_from: str | None = None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """All that one step computes. Self-contained: replaying the same outputs gives the same tokens."""

    step_id: int
    new_requests: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    transfers: tuple[Transfer, ...]
    preempted_ids: tuple[str, ...]
    """Forget these, before anything else: they come back as `new_requests`."""
    finished_ids: tuple[str, ...]
    """Forget these, before anything else: they finished or were aborted. An id may be forgotten and new in one step."""
    forgets_all: bool = False
    """Forget every request, before anything else: the step before was lost, and nobody knows how far it came."""
    max_rounds: int = 1
    """So many tokens may be sampled for each request, one after another: each has one token to compute first, samples,
    and owns the blocks for all rounds. The executor may end the step after any round; to replay one, say how many."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, or in each of its rounds."""
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself first, then the likeliest, best first.

    `ranks` are 1-based and counted over the whole vocabulary. The token itself is not repeated
    among the likeliest.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What one step computed for one request."""

    request_id: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For prompt positions this step made known, in order. Position 0 has none."""
    embedding: tuple[float, ...] | None = None
    error: str | None = None
    """Why this request has no result and must end, while the others go on; the code is as in `CompletionOutput`."""
    error_code: str | None = None


@dataclass(frozen=True, slots=True)
class OpTime:
    """One instruction of a plan in one step: its name with shapes and types, and its work in `arithmetic`."""

    name: str
    microseconds: float
    flops: int
    num_bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step computed, in the order of `SchedulerOutput.scheduled`, round after round; requests that did neither
    sample, nor pool, nor report prompt logprobs are absent. A result with an error is its request's last."""

    step_id: int
    results: tuple[RequestResult, ...]
    is_lost: bool = False
    """The executor raised. `results` name only requests that end with an error; all others will be recomputed."""
    num_rounds: int = 1
    """How many tokens were sampled one after another (`SchedulerOutput.max_rounds`)."""
    op_times: tuple[OpTime, ...] = ()
    """Per instruction that ran, where these are traced."""


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What `Scheduler.update` did for one request in one round: the token it appended, if any, the result, and where
    the request was then."""

    request: Request
    result: RequestResult
    new_token_id: int | None
    status: RequestStatus
