"""What serving costs: the same closed loop of clients through `quire serve` and offline through the engine, by turns.

    python -m benchmarks.served [--clients 1,8,32] [--turns 3] [--words 100] [--generate 128]

Both sides answer the same conversations, so many at once; when one ends, the next begins. Client, server and engine
share the machine, as they do for a user. Then, idle: time to the first token of one request, and of the first ten
after a start. With QUIRE_BENCH_LLAMA_CPP, llama.cpp's server takes a turn too. Next to read: `quire/cli/load_run.py`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.command_line import cpu_name, write_result
from quire import __version__
from quire.cli.bench_serve import Bodies
from quire.cli.load_client import Endpoint
from quire.cli.load_run import Load, LoadResult, put_load
from quire.engine.llm import LLM
from quire.sampling_params import SamplingParams

MAX_MODEL_LEN = 2048
READY_TIMEOUT_S = 120.0
Body = dict[str, Any]


class Offline:
    """The engine in this process."""

    name = "offline"

    def __init__(self, model: str) -> None:
        self._engine = LLM(model, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False).llm_engine
        self._num_asked = 0

    def measure(self, num_clients: int, bodies: Sequence[Body]) -> tuple[float, list[float]]:
        """Generated tokens per second, and the time to the first token of each request in seconds."""
        engine = self._engine
        waiting = iter(bodies)
        started: dict[str, float] = {}
        first: dict[str, float] = {}
        num_tokens, begin = 0, time.perf_counter()

        def ask() -> None:
            body = next(waiting, None)
            if body is None:
                return
            self._num_asked += 1
            request_id = str(self._num_asked)
            started[request_id] = time.perf_counter()
            tokenizer = engine.get_tokenizer()
            text = tokenizer.apply_chat_template(body["messages"])
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            params = SamplingParams(temperature=0, max_tokens=body["max_tokens"], ignore_eos=True)
            engine.add_request(request_id, token_ids, params)

        for _ in range(num_clients):
            ask()
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter() - started[output.request_id])
                if output.finished:
                    num_tokens += len(output.outputs[0].token_ids)
                    ask()
        return num_tokens / (time.perf_counter() - begin), list(first.values())


class Served:
    """A server in a process of its own."""

    def __init__(self, name: str, command: list[str], port: int, ready_path: str) -> None:
        self.name = name
        self._command = command
        self._port = port
        self._ready_path = ready_path

    @contextmanager
    def running(self) -> Iterator["Served"]:
        """Start it and wait until it answers."""
        with subprocess.Popen(self._command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
            try:
                self._wait(process)
                yield self
            finally:
                process.terminate()

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{self._ready_path}"):
                    return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"{self.name} does not start: {' '.join(self._command)}")

    def measure(self, num_clients: int, bodies: Sequence[Body]) -> tuple[float, list[float]]:
        """As `Offline.measure`, seen by the clients."""
        endpoint = Endpoint.parse(f"http://127.0.0.1:{self._port}", "/v1/chat/completions")
        result: LoadResult = put_load(endpoint, Load(concurrency=num_clients), bodies)
        if len(result.good) < len(bodies):
            failed = next(answer.error for answer in result.answers if answer.error is not None)
            raise SystemExit(f"{self.name}: {len(bodies) - len(result.good)} requests failed: {failed}")
        return result.tokens_per_s, [answer.time_to_first_s for answer in result.good]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--words", type=int, default=100)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--json", type=Path, help="file to write  [benchmarks/results/DATE-CPU-served.json]")
    parser.set_defaults(what="served")
    arguments = parser.parse_args()
    bodies = Bodies(arguments.model, arguments.words, arguments.generate, seed=0, temperature=0)
    offline = Offline(arguments.model)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        server = stack.enter_context(_quire(arguments).running())
        first_ten = [server.measure(1, bodies.take(1))[1][0] for _ in range(10)]
        sides: list[Offline | Served] = [offline, server]
        if (llama := _llama_cpp(arguments)) is not None:
            sides.append(stack.enter_context(llama.running()))
        for num_clients in map(int, arguments.clients.split(",")):
            turns = [bodies.take(max(8, 3 * num_clients)) for _ in range(arguments.turns)]
            rows += _row(sides, num_clients, turns)
        idle = {
            side.name: 1e3 * statistics.median(side.measure(1, bodies.take(1))[1][0] for _ in range(20))
            for side in sides
        }
    for name, milliseconds in idle.items():
        print(f"time to first token, idle, {name}: {milliseconds:.1f} ms")
    print(f"the same right after the start: first {1e3 * first_ten[0]:.1f} ms, tenth {1e3 * first_ten[9]:.1f} ms")
    result = {"rows": rows, "idle_ttft_ms": idle, "first_ten_ttft_ms": [1e3 * value for value in first_ten]}
    about = {"schema": "quire.bench.served/1", "version": __version__, "cpu": cpu_name(), "model": arguments.model}
    write_result({**about, **result}, arguments)


def _row(sides: list[Offline | Served], num_clients: int, turns: list[list[Body]]) -> list[dict[str, Any]]:
    speeds: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn, bodies in enumerate(turns):
        for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
            speeds[side.name].append(side.measure(num_clients, bodies)[0])
    base = statistics.median(speeds[sides[0].name])
    rows = []
    for name, values in speeds.items():
        median = statistics.median(values)
        print(f"{num_clients:3d} clients  {name:16s} {median:7.0f} tok/s  {100 * median / base:4.0f} %", flush=True)
        rows.append({"clients": num_clients, "side": name, "tokens_per_s": values, "share": median / base})
    return rows


def _quire(arguments: argparse.Namespace) -> Served:
    command = [sys.executable, "-m", "quire", "serve", arguments.model, "--port", str(arguments.port)]
    options = ["--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"]
    return Served("quire serve", [*command, *options], arguments.port, "/health/ready")


def _llama_cpp(arguments: argparse.Namespace) -> Served | None:
    interpreter = os.environ.get("QUIRE_BENCH_LLAMA_CPP")
    if not interpreter:
        print("llama.cpp's server: left out, QUIRE_BENCH_LLAMA_CPP names no interpreter")
        return None
    if subprocess.run([interpreter, "-c", "import llama_cpp.server.app"], capture_output=True).returncode:
        print("llama.cpp's server: left out, that interpreter has no llama-cpp-python[server]")
        return None
    from quire.weights.sources import resolve_source

    port = arguments.port + 1
    command = [interpreter, "-m", "llama_cpp.server", "--model", str(resolve_source(arguments.model).path)]
    return Served("llama.cpp", [*command, "--port", str(port), "--n_ctx", str(MAX_MODEL_LEN)], port, "/v1/models")


if __name__ == "__main__":
    main()
