"""Longest step while a reader attaches to a running engine, beside the median: no step waits for a reader.

    python -m benchmarks.attach [--model smollm2] [--streams 8] [--attaches 20] [--json]

All streams decode, one token a step. A reader attaches with `op_period` 8, as `quire trace --attach` does, stays for
some steps and leaves; a time is that of a step and of the lines that are taken after it. Beside it stand as many
windows of steps without a reader: on a busy machine their longest steps are long too.
Next to read: `src/quire/engine/recorder.py`.
"""

import statistics
import time

from benchmarks.command_line import Table, make_parser
from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.sampling_params import SamplingParams

PROMPT_LEN, WINDOW, OP_PERIOD = 64, 16, 8
MOST = 1.5
"""Largest median, over the attaches, of the longest step by the median step."""


def main() -> int:
    """Print a row without and one with a reader. Returns: 6 if the limit is exceeded."""
    parser = make_parser(__doc__, "model", "json")
    parser.add_argument("--streams", type=int, default=8, help="requests that decode  [%(default)s]")
    parser.add_argument("--attaches", type=int, default=20, help="readers, one after the other  [%(default)s]")
    arguments = parser.parse_args()
    length = PROMPT_LEN + 2 * WINDOW * (arguments.attaches + 1)
    engine = LLMEngine.from_options(
        arguments.model, max_model_len=length + 1, max_num_seqs=arguments.streams, multi_step_decode=1
    )
    params = SamplingParams(temperature=0, max_tokens=length - PROMPT_LEN, ignore_eos=True)
    for index in range(arguments.streams):
        ids = [(7 * index + at) % 1000 + 100 for at in range(PROMPT_LEN)]
        engine.add_request(str(index), {"prompt_token_ids": ids}, params)
    for _ in range(WINDOW):
        engine.step()
    windows: dict[str, list[list[float]]] = {"no reader": [], "a reader attaches": []}
    for _ in range(arguments.attaches):
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
