"""Messages between the server process and the engine process: MessagePack over a private socket pair.

Every message is a typed struct: data of another type is refused, and no received data can run code.
Knows no engine and no HTTP. Next to read: `parallel/frames.py`, then `client.py`.
"""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from quire.config import EngineConfig, EngineOptions
from quire.errors import QuireError
from quire.outputs import CompletionOutput, PositionLogprobs, RequestMetrics
from quire.parallel.frames import SentError
from quire.types import RequestSpec

# --- To the engine ----------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start", array_like=True):
    """The first message: options of the model to load. `is_replacement`: the server is already running."""

    options: EngineOptions
    is_replacement: bool = False


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """A request that the server has checked. `streams` False: only the final update is wanted.

    `queue_timeout_s`: longest wait for its first step.
    """

    spec: RequestSpec
    streams: bool = True
    queue_timeout_s: float | None = None


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """End these requests; unknown ids are ignored."""

    request_ids: list[str]


class Watch(msgspec.Struct, tag="watch", array_like=True):
    """Send `Lines` for a client from now on, or no longer; the first begin with a new header. See `Recorder`."""

    client_id: str
    is_wanted: bool
    op_period: int = 0
    op_interval_s: float = 0.0
    with_text: bool = False


ToEngine = Start | Submit | Abort | Watch


# --- From the engine --------------------------------------------------------------------------


class RequestUpdate(msgspec.Struct, array_like=True):
    """New outputs of one request since the previous update. `prompt_logprobs` come with the first update, `metrics` and
    `embedding` with the last.

    `choices`: completions with new text or tokens, and these only. `failure`: the request was refused, or the engine
    died; then it has no choices.
    """

    request_id: str
    choices: list[CompletionOutput] = []
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    embedding: list[float] | None = None
    metrics: RequestMetrics | None = None
    failure: SentError | None = None


class Histogram(msgspec.Struct, array_like=True):
    """Counts of values between bounds; `counts` has one more entry than the bounds, for values above the last."""

    counts: list[int]
    total: float = 0.0

    def add(self, bounds: Sequence[float], value: float, times: int = 1) -> None:
        """Count a value. A bucket includes its upper bound."""
        self.counts[bisect_left(bounds, value)] += times
        self.total += value * times


class Statistics(msgspec.Struct, array_like=True):
    """Gauges of the engine after a step, and counters since its start.

    Counters are cumulative, so a message that was not read loses nothing. Bounds of the histograms: `statistics.py`.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    num_running_prompt_tokens: int = 0
    """Prompt tokens of requests that have been scheduled."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    """Blocks without a reference, with or without a cached prefix."""
    num_cached_blocks: int = 0
    """Free blocks with a cached prefix."""
    num_computed_tokens: int = 0
    busy_s: float = 0.0
    """Time spent in steps."""
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_looked_up_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_disk_tokens: int = 0
    """Tokens whose KV blocks were read back from disk; those from host memory are `num_swapped_tokens`."""
    num_swapped_tokens: int = 0
    num_disk_bytes_read: int = 0
    num_disk_bytes_written: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Draft tokens that steps verified."""
    num_accepted_tokens: int = 0
    """Of these, those that were right."""
    num_drafts: int = 0
    """Drafts of which a step verified a token."""
    num_accepted_at: list[int] = []
    """Right draft tokens by their position in the draft."""
    num_finished: dict[str, int] = {}
    """By finish reason; each completion of `n` counts."""
    num_lost_events: int = 0
    histograms: dict[str, Histogram] = {}
    weights_mapped_bytes: int = 0
    """Weights larger than memory, which lie in a mapped file; 0 if all are in memory. All of this is of the engine's
    own process, read once a second."""
    weights_resident_bytes: int = 0
    """Of mapped files, what is in memory."""
    weights_limit_bytes: int = 0
    """Room for weights beside the KV cache and a step."""
    weights_read_bytes: int = 0
    """Read from disk, without KV blocks."""
    experts_chosen_bytes: int = 0
    """Experts that steps read, from memory or from disk."""


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The model is loaded and has computed a first request."""

    config: EngineConfig
    startup_times: dict[str, float]


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The model cannot be loaded."""

    failure: SentError

    @classmethod
    def of(cls, error: QuireError) -> "Refused":
        """Return the message for an error."""
        return cls(SentError.of(error))


class Updates(msgspec.Struct, tag="updates", array_like=True):
    """Updates of one step, and how the prefix cache changed since the last message: see `prefixes.py`."""

    updates: list[RequestUpdate]
    statistics: Statistics
    cached: bytes = b""
    evicted: bytes = b""


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True):
    """Sign of life, once a second, also during a step."""


class Lines(msgspec.Struct, tag="lines", array_like=True):
    """JSON lines of a `Recorder` for one client."""

    client_id: str | None
    data: bytes


FromEngine = Ready | Refused | Updates | Heartbeat | Lines
