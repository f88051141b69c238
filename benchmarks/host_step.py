"""Host time of one decode step, everything but the model: schedule, update, outputs, the event log, and its reader.

    python -m benchmarks.host_step [--streams 1,32,256] [--steps 300] [--model smollm2] [--json]

An executor that computes nothing answers at once, so what is left is Quire's own Python: the scheduler, the block
manager, detokenisation and the cumulative `RequestOutput` of every stream. All streams decode; every step is timed,
and medians are shown. With `--model` the model is computed too, and its native calls are taken off: then the batch's
layout, the results, and the messages to the server's process are counted as well.
Next to read: `src/quire/engine/llm_engine.py`.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.command_line import Table, make_parser
from quire.engine.llm_engine import LLMEngine
from quire.engine.process.child import update_of
from quire.engine.process.messages import Updates
from quire.engine.process.statistics import Meter
from quire.engine.recorder import Recorder
from quire.events import EventLog
from quire.parallel.frames import frame
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestResult, SchedulerOutput, StepResult
from tests.engine.builders import byte_tokenizer, make_config

PROMPT_LEN = 128
NUM_WARM_STEPS = 30
PARTS = ("schedule", "update", "outputs")


class InstantExecutor:
    """Every request that samples gets the letter "a"."""

    max_in_flight = 1

    def submit(self, output: SchedulerOutput) -> None:
        self._output = output

    def collect(self) -> StepResult:
        output = self._output
        results = tuple(RequestResult(item.request_id, (97,)) for item in output.scheduled if item.max_new_tokens)
        return StepResult(output.step_id, results)

    def end_step_early(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class SilentLog(EventLog):
    """Records nothing."""

    def record(self, *_: Any, **__: Any) -> None:
        pass


class Stopwatch:
    """Seconds spent in each wrapped function since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

        return timed

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return taken


def measure(num_streams: int, num_steps: int, *, with_events: bool, is_watched: bool = False) -> dict[str, float]:
    """Median µs of a step and its parts, with all streams decoding; `is_watched`: and its event lines are written."""
    max_model_len = PROMPT_LEN + num_steps + NUM_WARM_STEPS + 16
    config = make_config(
        max_num_seqs=num_streams, max_num_batched_tokens=max(2048, num_streams), max_model_len=max_model_len,
        block_size=32, num_blocks=2 + num_streams * (max_model_len // 32 + 2),
    )  # fmt: skip
    events = EventLog(config.options.max_num_events) if with_events else SilentLog()
    scheduler = Scheduler(config.scheduler, events if with_events else None)
    executor, watch = InstantExecutor(), Stopwatch()
    engine = LLMEngine(config, executor, byte_tokenizer(), events, scheduler=scheduler)
    params = SamplingParams(temperature=0, max_tokens=None)
    for stream in range(num_streams):
        prompt = [(stream + 7 * position) % 251 for position in range(PROMPT_LEN)]
        engine.add_request(str(stream), {"prompt_token_ids": prompt}, params)
    while scheduler.num_waiting:
        engine.step()
    for _ in range(NUM_WARM_STEPS // 2):
        engine.step()
    scheduler.schedule = watch.wrap("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update = watch.wrap("update", scheduler.update)  # type: ignore[method-assign]
    processor = engine._output_processor
    processor.process = watch.wrap("outputs", processor.process)  # type: ignore[method-assign]
    executor.collect = watch.wrap("execute", executor.collect)  # type: ignore[method-assign]
    recorder = Recorder(engine) if is_watched else None
    rows: list[dict[str, float]] = []
    num_before = events.num_recorded
    for _ in range(num_steps):
        started = time.perf_counter()
        outputs = engine.step()
        if recorder is not None:
            recorder.take()
        total = time.perf_counter() - started
        assert len(outputs) == num_streams
        parts = watch.take()
        rows.append({name: parts[name] for name in PARTS} | {"total": total - parts["execute"]})
    medians = {name: statistics.median(row[name] for row in rows) * 1e6 for name in (*PARTS, "total")}
    return medians | {"events_per_step": (events.num_recorded - num_before) / num_steps}


def measure_with_model(model: str, num_streams: int, num_steps: int) -> dict[str, float]:
    """Median µs of a server's step: of what is around the native calls, and of these."""
    engine = LLMEngine.from_options(
        model,
        device="cpu",
        max_model_len=1024,
        multi_step_decode=1,
        enable_prefix_caching=False,
        speculative="off",
        max_num_seqs=num_streams,
    )
    watch, meter = Stopwatch(), Meter(engine)
    planned = engine._executor._worker.runner.forward.planned  # type: ignore[attr-defined]
    planned.run = watch.wrap("native", planned.run)
    for stream in range(num_streams):
        prompt = [100 + (stream + 7 * position) % 2000 for position in range(PROMPT_LEN)]
        params = SamplingParams(temperature=0, max_tokens=800, ignore_eos=True)
        engine.submit(replace(engine.input_processor.prepare(str(stream), prompt, params), tells_news=True))
    samples: dict[str, list[float]] = {"native": [], "messages": [], "host": []}
    while len(samples["host"]) < NUM_WARM_STEPS + num_steps:
        watch.take()
        started = time.perf_counter()
        outputs = engine.step()
        stepped = time.perf_counter()
        updates = [update_of(output) for output in outputs]
        frame(Updates(updates, meter.take(updates), *meter.prefixes.take()))
        ended = time.perf_counter()
        native = watch.take()["native"]
        for name, seconds in (("native", native), ("messages", ended - stepped), ("host", ended - started - native)):
            samples[name].append(1e6 * seconds)
    engine.shutdown()
    return {name: statistics.median(values[NUM_WARM_STEPS:]) for name, values in samples.items()}


def main() -> None:
    """Print a row per number of streams, in µs."""
    parser = make_parser(__doc__, "json")
    parser.add_argument("--streams", default="1,32,256", help="numbers of streams")
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed")
    parser.add_argument("--model", help="compute this model too")
    arguments = parser.parse_args()
    columns = ("native", "messages", "host") if arguments.model else (
        *PARTS, "total", "events off", "watched", "events", "per stream")  # fmt: skip
    table = Table({"streams": "d", **dict.fromkeys(columns, ".1f")}, as_json=arguments.json)
    for num_streams in map(int, arguments.streams.split(",")):
        if arguments.model:
            table.row(num_streams, *measure_with_model(arguments.model, num_streams, arguments.steps).values())
            continue
        on = measure(num_streams, arguments.steps, with_events=True)
        off = measure(num_streams, arguments.steps, with_events=False)
        watched = measure(num_streams, arguments.steps, with_events=True, is_watched=True)
        totals = (on["total"], off["total"], watched["total"])
        table.row(num_streams, *(on[name] for name in PARTS), *totals, on["events_per_step"], totals[0] / num_streams)


if __name__ == "__main__":
    main()
