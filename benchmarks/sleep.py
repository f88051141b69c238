"""Memory and times of a model that sleeps, and of a second model in one server: `python -m benchmarks.sleep [MODEL]`.

Prints: resident memory of the engine before, during and after sleep; the time of the first load, of waking up and of a
second engine's start; the first token of a second model beside its load time.
"""

import json
import re
import sys
import time
import urllib.request
from typing import Any

from benchmarks.server_process import ServerProcess, quire_serve

MIB = 1 << 20
PROMPT = "The history of the city begins with " * 200


def post(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> tuple[float, bytes]:
    """Send a request and return the seconds to the first line of its answer, and that line."""
    request = urllib.request.Request(
        server.url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    )
    began_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as response:
        line = response.readline()
        taken_s = time.monotonic() - began_s
        response.read()
    return taken_s, line


def complete(server: ServerProcess, model: str, prompt: str = "Once", max_tokens: int = 4) -> float:
    """Return the seconds to the first token of a greedy completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return post(server, "/v1/completions", body)[0]


def resident(server: ServerProcess) -> tuple[float, float]:
    """Return the resident MiB of the server's own process and of its engines."""
    server_process, *_ = server.processes()
    engines = [item for item in server.processes() if "quire.engine.process.child" in item.cmdline()]
    return server_process.memory_info().rss / MIB, sum(item.memory_info().rss for item in engines) / MIB


def show_sleep(model: str) -> None:
    """Sleep and wake up a server of one model."""
    server = ServerProcess(quire_serve(model, name="a"))
    try:
        complete(server, "a", PROMPT, 64)
        _, before = resident(server)
        sleep_s, _ = post(server, "/sleep")
        own, asleep = resident(server)
        wake_s, _ = post(server, "/wake_up")
        first_s = complete(server, "a")
        complete(server, "a", PROMPT, 64)
        _, after = resident(server)
        print(
            f"engine's memory   before {before:.0f} MiB, asleep {asleep:.0f} MiB (server {own:.0f}), after {after:.0f}"
        )
        print(f"start {server.start_s:.2f} s, sleep {sleep_s:.2f} s, wake-up {wake_s:.2f} s, then first token "
              f"{first_s * 1000:.0f} ms")  # fmt: skip
    finally:
        server.kill()


def show_second_model(model: str) -> None:
    """Ask for a second model while the first is loaded, and switch between them within memory for one."""
    server = ServerProcess(quire_serve(f"a={model}", f"b={model}", name=None))
    try:
        first_s = complete(server, "b")
        loads = [float(text) for text in re.findall(r"loaded b in ([0-9.]+) s", server.stderr)]
        print(f"two models: first token of the second {first_s:.2f} s, its load {loads[0]:.2f} s; loaded again "
              f"{complete(server, 'b') * 1000:.0f} ms")  # fmt: skip
    finally:
        server.kill()


def main() -> None:
    """Print the figures of a model, SmolLM2 unless an argument names another."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    show_sleep(model)  # fills the plan cache
    show_sleep(model)
    show_second_model(model)


if __name__ == "__main__":
    main()
