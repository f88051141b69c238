"""`TorchProfile`: what `torch.profiler` sees of a run, as one more line of its trace.

Times are moved to the clock of the engine's events, so that both stand on one timeline. On a CPU a planned step is one
native call, which PyTorch does not see; operations appear where a model runs op by op, and kernels on a GPU.
Next to read: `chrome.py`, which draws the line.
"""

import json
import time
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, record_function

CLOCK = "quire.clock"


class TorchProfile:
    """Context manager around the run."""

    def __init__(self) -> None:
        has_gpu = torch.cuda.is_available()
        self._profile = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])])
        self._start_s = 0.0

    def __enter__(self) -> "TorchProfile":
        self._profile.start()
        self._start_s = time.monotonic()
        with record_function(CLOCK):  # its time in the profile is this one in the trace
            pass
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._profile.stop()

    def line(self) -> bytes:
        """Return the line of the trace. `slices`: track, name, start in s, duration in s."""
        events = self._profile.events() or []
        zero_us = next(event.time_range.start for event in events if event.name == CLOCK)
        slices = [
            (
                f"GPU {event.device_index}" if event.device_type.name == "CUDA" else f"thread {event.thread}",
                event.name,
                self._start_s + (event.time_range.start - zero_us) / 1e6,
                event.time_range.elapsed_us() / 1e6,
            )
            for event in events
            if event.name != CLOCK
        ]
        return json.dumps({"t": time.monotonic(), "kind": "torch", "slices": slices}).encode() + b"\n"
