"""`TorchProfile`: what `torch.profiler` sees of a run, as one more line of its trace.

Times are moved to the clock of the engine's events, so that both stand on one timeline. On a CPU a planned step is one
native call, which PyTorch does not see; operations appear where a model runs op by op, and kernels on a GPU.
Next to read: `chrome.py`, which draws the line.
"""

import json
import os
import time
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, record_function

CLOCK = "quire.clock"
NUM_CLOCK_READS = 10
"""The clocks are compared at the quickest of these reads: the first takes PyTorch a millisecond, and any may wait."""


class TorchProfile:
    """Context manager around the run."""

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library writes its stages to stderr
        has_gpu = torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])])
        self._clock_reads: list[tuple[float, float]] = []

    def __enter__(self) -> "TorchProfile":
        self._profile.start()
        for _ in range(NUM_CLOCK_READS):
            start_s = time.monotonic()
            with record_function(CLOCK):  # its time in the profile is this one in the trace
                pass
            self._clock_reads.append((start_s, time.monotonic()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._profile.stop()

    def line(self) -> bytes:
        """Return the line of the trace. `slices`: track, name, start in s, duration in s."""
        events = self._profile.events() or []
        clock_us = [event.time_range.start for event in events if event.name == CLOCK]
        reads = zip(self._clock_reads, clock_us, strict=True)
        (zero_s, _), zero_us = min(reads, key=lambda read: read[0][1] - read[0][0])
        slices = [
            (
                f"GPU {event.device_index}" if event.device_type.name == "CUDA" else f"thread {event.thread}",
                event.name,
                zero_s + (event.time_range.start - zero_us) / 1e6,
                event.time_range.elapsed_us() / 1e6,
            )
            for event in events
            if event.name != CLOCK
        ]
        return json.dumps({"t": time.monotonic(), "kind": "torch", "slices": slices}).encode() + b"\n"
