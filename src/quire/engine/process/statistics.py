"""Statistics of the engine, read from its event log after each step.

Only the times of single requests come from their outputs. `Meter` takes a fraction of a percent of a step.
Knows no HTTP.
Next to read: `../../events.py`, `child.py`.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire._native import expert_bytes_wanted
from quire.engine.process.messages import Histogram, RequestUpdate, Statistics
from quire.engine.process.prefixes import PrefixJournal
from quire.events import Event, EventKind
from quire.memory_plan import mapped_bytes, mapped_limit
from quire.runtime.hardware import mapped_memory

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

STEP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
LATENCY_BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0,
)  # fmt: skip
BOUNDS_S: dict[str, Sequence[float]] = {
    "step_decode": STEP_BOUNDS_S,
    "step_prefill": STEP_BOUNDS_S,
    "time_to_first_token": LATENCY_BOUNDS_S,
    "inter_token": TOKEN_BOUNDS_S,
    "queue": LATENCY_BOUNDS_S,
    "request": LATENCY_BOUNDS_S,
}
"""Upper bounds of the buckets of each histogram of `Statistics`."""
LOOK_AT_WEIGHTS_EVERY_S = 1.0


class Meter:
    """Statistics of one engine; events before its construction do not count."""

    def __init__(self, engine: "LLMEngine", clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._num_seen = engine.events.num_recorded
        self._prompt_lens: dict[str, int] = {}
        self._last_token_s: dict[str, float] = {}
        self._looked_at_weights_s = float("-inf")
        self.statistics = Statistics(
            histograms={name: Histogram([0] * (len(bounds) + 1)) for name, bounds in BOUNDS_S.items()}
        )
        self.prefixes = PrefixJournal(engine)

    def take(self, updates: Sequence[RequestUpdate]) -> Statistics:
        """Return the statistics up to now; `updates`: of the last step. Mutates: the object returned before."""
        now_s = self._clock()
        self._read_events()
        gaps: dict[tuple[float, int], int] = {}
        for update in updates:
            self._read_update(update, now_s, gaps)
        for (before_s, longest), times in gaps.items():
            self._observe("inter_token", (now_s - before_s) / longest, longest * times)
        self._look_at_scheduler(now_s)
        return self.statistics

    def _read_events(self) -> None:
        events = self._engine.events
        new = events.since(self._num_seen)
        num_lost = events.num_recorded - self._num_seen - len(new)
        self.statistics.num_lost_events += num_lost
        if num_lost:
            self.prefixes.note_all()
        self._num_seen = events.num_recorded
        for event in new:
            reader = _READERS.get(event.kind)
            if reader is not None:
                reader(self, event)

    def _on_admit(self, event: Event) -> None:
        statistics, prompt_len = self.statistics, event.data["num_prompt_tokens"]
        if event.data["is_resumed"]:  # it finds its own blocks: that is no hit of the prefix cache
            return
        self._prompt_lens[event.request_id] = prompt_len
        statistics.num_running_prompt_tokens += prompt_len
        statistics.num_prompt_tokens += prompt_len
        statistics.num_looked_up_tokens += prompt_len
        statistics.num_cached_tokens += event.data["num_cached_tokens"]

    def _on_cache_change(self, event: Event) -> None:
        self.prefixes.note(event.data["block_ids"])

    def _on_preempt(self, event: Event) -> None:
        self.statistics.num_preemptions += 1

    def _on_fetched(self, event: Event) -> None:
        self.statistics.num_disk_tokens += event.data["num_disk_tokens"]
        self.statistics.num_swapped_tokens += event.data["num_host_tokens"]

    def _on_disk(self, event: Event) -> None:
        self.statistics.num_disk_bytes_read += event.data["num_bytes_read"]
        self.statistics.num_disk_bytes_written += event.data["num_bytes_written"]

    def _on_step(self, event: Event) -> None:
        data, statistics = event.data, self.statistics
        if data["num_tokens"] == 0:  # nothing was computed
            return
        num_iterations = data["num_iterations"]
        kind = "step_prefill" if data["has_prompts"] else "step_decode"
        self._observe(kind, data["duration_s"] / num_iterations, num_iterations)
        statistics.num_steps += num_iterations
        statistics.num_computed_tokens += data["num_tokens"]
        statistics.busy_s += data["duration_s"]
        statistics.num_draft_tokens += data["num_drafts"]
        statistics.num_accepted_tokens += data["num_accepted"]
        for _, num_right in data["drafts"]:
            statistics.num_drafts += 1
            accepted_at = statistics.num_accepted_at
            accepted_at += [0] * (num_right - len(accepted_at))
            for position in range(num_right):
                accepted_at[position] += 1

    def _on_finish(self, event: Event) -> None:
        statistics = self.statistics
        statistics.num_running_prompt_tokens -= self._prompt_lens.pop(event.request_id, 0)
        reason = event.data["reason"]
        statistics.num_finished[reason] = statistics.num_finished.get(reason, 0) + 1

    def _read_update(self, update: RequestUpdate, now_s: float, gaps: dict[tuple[float, int], int]) -> None:
        """`gaps`: time of the token before and number of new ones, counted: streams of one step share both."""
        num_tokens = longest = 0
        for choice in update.choices:
            num_new = len(choice.token_ids)
            num_tokens += num_new
            if num_new > longest:
                longest = num_new
        self.statistics.num_generated_tokens += num_tokens
        before_s = self._last_token_s.pop(update.request_id, None)
        metrics = update.metrics
        if not update.finished:
            self._last_token_s[update.request_id] = now_s
        if longest and before_s is not None:
            gap = (before_s, longest)
            gaps[gap] = gaps.get(gap, 0) + 1
        if metrics is None:
            return
        arrival_s = metrics.arrival_time_s
        if metrics.first_scheduled_time_s is not None:
            self._observe("queue", metrics.first_scheduled_time_s - arrival_s)
        if metrics.first_token_time_s is not None:
            self._observe("time_to_first_token", metrics.first_token_time_s - arrival_s)
            if before_s is None and longest > 1 and metrics.last_token_time_s is not None:
                # The request does not stream, so all tokens came at once: only their mean distance is known.
                distance_s = (metrics.last_token_time_s - metrics.first_token_time_s) / (longest - 1)
                self._observe("inter_token", distance_s, longest - 1)
        if metrics.finished_time_s is not None:
            self._observe("request", metrics.finished_time_s - arrival_s)

    def _look_at_scheduler(self, now_s: float) -> None:
        scheduler, statistics = self._engine.scheduler, self.statistics
        statistics.num_running = scheduler.num_running
        statistics.num_waiting = scheduler.num_waiting
        pool = scheduler.blocks.pool
        statistics.num_blocks, statistics.num_free_blocks = pool.num_usable, pool.num_free
        statistics.num_cached_blocks = pool.num_cached
        if self._engine.config.weights_on_disk:
            self._look_at_weights(now_s)

    def _look_at_weights(self, now_s: float) -> None:
        config, statistics = self._engine.config, self.statistics
        if now_s < self._looked_at_weights_s + LOOK_AT_WEIGHTS_EVERY_S and self._engine.scheduler.has_unfinished:
            return
        self._looked_at_weights_s = now_s
        statistics.weights_mapped_bytes, statistics.weights_limit_bytes = mapped_bytes(config), mapped_limit(config)
        statistics.weights_resident_bytes, num_read = mapped_memory()
        statistics.weights_read_bytes = num_read - statistics.num_disk_bytes_read
        statistics.experts_chosen_bytes = expert_bytes_wanted()

    def _observe(self, name: str, value_s: float, times: int = 1) -> None:
        # Times of two processes: the other clock may be slightly ahead.
        self.statistics.histograms[name].add(BOUNDS_S[name], max(0.0, value_s), times)


_READERS: dict[EventKind, Callable[[Meter, Event], None]] = {
    EventKind.ADMIT: Meter._on_admit,
    EventKind.CACHE: Meter._on_cache_change,
    EventKind.EVICT: Meter._on_cache_change,
    EventKind.PREEMPT: Meter._on_preempt,
    EventKind.FETCHED: Meter._on_fetched,
    EventKind.DISK: Meter._on_disk,
    EventKind.STEP: Meter._on_step,
    EventKind.FINISH: Meter._on_finish,
}
