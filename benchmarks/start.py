"""Seconds and memory from the start of a process to the first token: first start, second start, and llama.cpp.

    python -m benchmarks.start [--model smollm2] [--repetitions 5] [--threads 2] [--llama-cpp-python PYTHON]

The cache directory of the first start is empty but for the model. Files are in the page
cache. Medians of processes that take turns; memory is the largest resident set.
"""

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping

from benchmarks.command_line import Table, cpu_name, make_parser
from quire.weights.sources import resolve_source

LLAMA_CPP = (
    "import sys, llama_cpp\n"
    "model = llama_cpp.Llama(sys.argv[1], n_ctx=8192, n_threads=int(sys.argv[2]), verbose=False)\n"
    "model.create_chat_completion([{'role': 'user', 'content': 'hi'}], max_tokens=1)\n"
)


def measured(command: list[str], variables: Mapping[str, str]) -> tuple[float, float]:
    """Run a command. Returns: seconds, and megabytes of the largest resident set."""
    started = time.perf_counter()
    process = os.posix_spawnp(
        command[0], command, {**os.environ, **variables},
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)],
    )  # fmt: skip
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{' '.join(command)[:200]} failed with {os.waitstatus_to_exitcode(status)}")
    assert isinstance(usage, resource.struct_rusage)
    return seconds, usage.ru_maxrss / 1000


def main() -> None:
    """Print a row per side."""
    parser = make_parser(__doc__, "model", "repetitions", "threads", "json")
    parser.add_argument("--llama-cpp-python", default=os.environ.get("QUIRE_BENCH_LLAMA_CPP"))
    arguments = parser.parse_args()
    path = str(resolve_source(arguments.model).path)
    quire = [sys.executable, "-m", "quire", "run", path, "hi", "--max-tokens", "1"]
    sides = {"quire, first start": quire, "quire, second start": quire}
    if arguments.llama_cpp_python:
        sides["llama.cpp"] = [arguments.llama_cpp_python, "-c", LLAMA_CPP, path, str(arguments.threads)]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(arguments.repetitions):
        with tempfile.TemporaryDirectory() as cache:
            variables = {
                "QUIRE_CACHE_DIR": cache, "OMP_NUM_THREADS": str(arguments.threads),
                "PYTHONDONTWRITEBYTECODE": "",  # users have bytecode from the first start on
            }  # fmt: skip
            for name, command in sides.items():
                found[name].append(measured(command, variables))
    second = statistics.median(seconds for seconds, _ in found["quire, second start"])
    table = Table({cpu_name(): "", "s": ".2f", "second start ×": ".2f", "MB": ".0f"}, as_json=arguments.json)
    for name, runs in found.items():
        seconds, megabytes = (statistics.median(values) for values in zip(*runs, strict=True))
        table.row(name, seconds, seconds / second, megabytes)


if __name__ == "__main__":
    main()
