"""Longest step while a reader attaches to a running engine, beside the median: no step waits for a reader.

    python -m benchmarks.attach [--page] [--model smollm2] [--streams 8] [--attaches 20] [--json]

All streams decode, one token a step. A reader attaches with `op_period` 8, as `quire trace --attach` does, stays for
some steps and leaves; a time is that of a step and of the lines that are taken after it. Beside it stand as many
windows of steps without a reader: on a busy machine their longest steps are long too.
With `--page` the reader is as the page: it stays, times a step at most every 500 ms, and takes the lines 20 times a
second. The rows are throughput without it and with it, in windows of 1 s by turns, about half a minute in all; the
ratio of each pair goes to stderr when it is known.
Next to read: `src/quire/engine/recorder.py`.
"""

import argparse
import statistics
import sys
import time

from benchmarks.command_line import Table, make_parser
from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.sampling_params import SamplingParams

PROMPT_LEN, WINDOW, OP_PERIOD = 64, 16, 8
PAGE_LENGTH, PAGE_PAIRS = 2048, 12
MOST = 1.5
"""Largest median, over the attaches, of the longest step by the median step."""
PAGE_WINDOW_S, PAGE_INTERVAL_S, LINES_EVERY_S = 1.0, 0.5, 0.05
MOST_OF_PAGE = 0.02
"""Largest share of throughput that a page may cost."""


def main() -> int:
    """Print a row without and one with a reader. Returns: 6 if the limit is exceeded."""
    parser = make_parser(__doc__, "model", "json")
    parser.add_argument("--streams", type=int, default=8, help="requests that decode  [%(default)s]")
    parser.add_argument("--attaches", type=int, help=f"readers, one after the other  [20; with --page {PAGE_PAIRS}]")
    parser.add_argument("--page", action="store_true", help="cost of a page that looks, instead")
    arguments = parser.parse_args()
    if arguments.page:
        return _page(arguments)
    num_attaches = arguments.attaches or 20
    length = PROMPT_LEN + 2 * WINDOW * (num_attaches + 1)
    engine = _decoding(arguments, length)
    windows: dict[str, list[list[float]]] = {"no reader": [], "a reader attaches": []}
    for _ in range(num_attaches):
        for name, found in windows.items():
            found.append(_window(engine, attaches=name != "no reader"))
    engine.shutdown()
    table = Table({"steps": "", "median ms": ".2f", "longest ms": ".2f", "ratio": ".2f"}, as_json=arguments.json)
    median_s = statistics.median(second for window in windows["no reader"] for second in window)
    worst = 0.0
    for name, found in windows.items():
        longest_s = statistics.median(max(window) for window in found)
        worst = longest_s / median_s
        median_of_name = statistics.median(second for window in found for second in window)
        table.row(name, 1e3 * median_of_name, 1e3 * longest_s, worst)
    return 0 if worst <= MOST else 6


def _decoding(arguments: argparse.Namespace, length: int) -> LLMEngine:
    """Return an engine whose streams decode up to `length` tokens each."""
    engine = LLMEngine.from_options(
        arguments.model, device="cpu", max_model_len=length + 1, max_num_seqs=arguments.streams, multi_step_decode=1
    )
    _add_streams(engine, arguments.streams, length)
    for _ in range(WINDOW):
        engine.step()
    return engine


def _add_streams(engine: LLMEngine, num_streams: int, length: int, name: str = "") -> list[str]:
    """Add requests. Returns: their ids."""
    params = SamplingParams(temperature=0, max_tokens=length - PROMPT_LEN, ignore_eos=True)
    for index in range(num_streams):
        ids = [(7 * index + at) % 1000 + 100 for at in range(PROMPT_LEN)]
        engine.add_request(f"{name}{index}", {"prompt_token_ids": ids}, params)
    return [f"{name}{index}" for index in range(num_streams)]


def _page(arguments: argparse.Namespace) -> int:
    """Print throughput without and with a page. Returns: 6 if it costs too much."""
    engine = _decoding(arguments, PAGE_LENGTH)
    running = [str(index) for index in range(arguments.streams)]
    rates: dict[str, list[float]] = {"no page": [], "a page looks": []}
    num_pairs = arguments.attaches or PAGE_PAIRS
    for number in range(num_pairs):
        engine.abort_request(running)
        running = _add_streams(engine, arguments.streams, PAGE_LENGTH, f"{number}-")
        for _ in range(WINDOW):
            engine.step()
        # Contexts grow, and steps take longer: each goes first as often as the other.
        for name in sorted(rates, reverse=bool(number % 2)):
            rates[name].append(_rate(engine, looks=name != "no page"))
        ratio = rates["a page looks"][-1] / rates["no page"][-1]
        print(f"pair {number + 1} of {num_pairs}: {ratio:.3f}", file=sys.stderr, flush=True)
    engine.shutdown()
    table = Table({"reader": "", "tokens/s": ".1f", "of no page": ".4f"}, as_json=arguments.json)
    # Neighbours share the machine's other load: their ratio has less of it than two medians.
    ratio = statistics.median(with_page / alone for alone, with_page in zip(*rates.values(), strict=True))
    for name, found in rates.items():
        table.row(name, statistics.median(found), 1.0 if name == "no page" else ratio)
    return 0 if ratio >= 1 - MOST_OF_PAGE else 6


def _rate(engine: LLMEngine, *, looks: bool) -> float:
    """Return the tokens per second of a window of time."""
    recorder = Recorder(engine, op_interval_s=PAGE_INTERVAL_S) if looks else None
    started = taken = time.perf_counter()
    num_tokens = 0
    while (now := time.perf_counter()) < started + PAGE_WINDOW_S:
        num_tokens += len(engine.step())
        if recorder is not None and now - taken >= LINES_EVERY_S:
            taken = now
            recorder.take()
    if recorder is not None:
        recorder.close()
    return num_tokens / (time.perf_counter() - started)


def _window(engine: LLMEngine, *, attaches: bool) -> list[float]:
    """Return the seconds of some steps; a reader attaches in the first and leaves after the last."""
    seconds, recorder = [], None
    for at in range(WINDOW):
        started = time.perf_counter()
        if attaches and at == 0:
            recorder = Recorder(engine, op_period=OP_PERIOD)
        engine.step()
        if recorder is not None:
            recorder.take()
        seconds.append(time.perf_counter() - started)
    if recorder is not None:
        recorder.close()
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
