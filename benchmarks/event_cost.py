"""Cost of the event log on the real model: steps take turns with it off, on, and on with a reader (an open page).

    python -m benchmarks.event_cost [--streams 32] [--steps 1500] [--model smollm2]

Step by step in one engine, so that what else the machine does meets all three alike; medians are compared.
Next to read: `host_step.py`, which times the host's part of a step alone.
"""

import argparse
import statistics
import time
from typing import Any

from quire.config import EngineOptions
from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.events import EventLog
from quire.insight.compare.rig import load
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source

MODES = ("off", "on", "watched")
STEPS_PER_READ = 4
"""The page reads at 20 Hz, so once in several steps."""


class SwitchedLog(EventLog):
    """Records while `is_on`."""

    is_on = True

    def record(self, *arguments: Any, **data: Any) -> None:
        if self.is_on:
            super().record(*arguments, **data)


def measure(model: str, num_streams: int, num_steps: int) -> dict[str, float]:
    """Return the median seconds of a decode step in each mode."""
    options = EngineOptions(
        model=model, max_num_seqs=num_streams, max_model_len=2048, multi_step_decode=1, enable_prefix_caching=False
    )
    config, executor = load(options, open_checkpoint(resolve_source(model)))
    events = SwitchedLog()
    engine = LLMEngine(config, executor, None, events, scheduler=Scheduler(config.scheduler, events))
    params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
    for stream in range(num_streams):
        engine.add_request(str(stream), {"prompt_token_ids": [stream + 5] * 32}, params)
    while engine.scheduler.num_waiting:
        engine.step()
    recorder, times = Recorder(engine), {mode: list[float]() for mode in MODES}
    watcher = engine.watcher
    for index in range(num_steps):
        mode = MODES[index % len(MODES)]
        events.is_on, engine.watcher = mode != "off", watcher if mode == "watched" else None
        start = time.perf_counter()
        engine.step()
        if mode == "watched" and index // len(MODES) % STEPS_PER_READ == 0:
            recorder.take()
        times[mode].append(time.perf_counter() - start)
    engine.shutdown()
    return {mode: statistics.median(values) for mode, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32, help="requests that decode together")
    parser.add_argument("--steps", type=int, default=1500, help="steps, a third in each mode")
    parser.add_argument("--model", default="smollm2", help="model to run")
    arguments = parser.parse_args()
    medians = measure(arguments.model, arguments.streams, arguments.steps)
    for mode, seconds in medians.items():
        print(f"{mode:8} {1e3 * seconds:8.3f} ms per step  {seconds / medians['off'] - 1:+.2%}")


if __name__ == "__main__":
    main()
