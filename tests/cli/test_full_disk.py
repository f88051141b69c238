"""A server whose log lies on a full disk, and one that may write nothing, serve all the same."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.cli.tiny_directory import make_tiny_directory

ROOT = Path(__file__).parents[2]
LIMIT_S = 90.0


def test_server_that_cannot_write_serves(tmp_path: Path) -> None:
    model = make_tiny_directory(tmp_path / "model")
    held = socket.socket()  # no other process gets its port, the server does: nothing listens on it
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    blocked = tmp_path / "file"
    blocked.touch()
    places = {name: str(blocked / "below") for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "QUIRE_CACHE_DIR")}
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", str(model), "--port", str(port), "--served-model-name", "m"],
            env={**os.environ, **places, "PYTHONPATH": str(ROOT / "src")}, stdout=full, stderr=full,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )  # fmt: skip
    try:
        answer = _answer(port)
        assert answer["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        held.close()


def _answer(port: int) -> dict[str, dict[str, int]]:
    body = {"model": "m", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
                found: dict[str, dict[str, int]] = json.load(response)
                return found
        except OSError as error:  # it does not listen yet, or its model is being loaded
            if getattr(error, "code", 503) != 503 or time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
