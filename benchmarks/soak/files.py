"""F6 of the fault table: the model's file goes, the disk is full, directories cannot be written.

A full disk is played by `/dev/full` for what the server logs, and by a limit of no bytes for any file it writes; a
read-only directory by a place below a file, where root cannot write either.
Next to read: `src/quire/weights/model_files.py`, `src/quire/server/registration.py`.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.soak.client import Seen, ask, chat_body, get
from benchmarks.soak.row import Row
from benchmarks.soak.server import serving
from quire.weights.sources import resolve_source

BODY = chat_body("Tell me a story.", 40)
NO_BYTES = (
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); os.execv(sys.argv[1], sys.argv[1:])"
)
WEIGHTS = ("*.gguf", "*.safetensors")


async def lost_files(model: str) -> Row:
    """F6: each loss, before the start and while the server serves."""
    row = Row("F6", "model file truncated or removed, disk full, directories that cannot be written")
    with tempfile.TemporaryDirectory() as directory:
        whole = _copy(Path(resolve_source(model, revision=None, progress=None).path), Path(directory) / "whole")
        await _before_the_start(row, whole, Path(directory))
        for loss in ("truncated", "removed"):
            await _in_service(row, loss, _copy(whole, Path(directory) / loss))
        blocked = Path(directory) / "file"
        blocked.touch()
        await _without_writing(row, str(whole), blocked / "below")
        await _with_full_log(row, str(whole))
    return row


def _copy(source: Path, target: Path) -> Path:
    """The model as a directory or file of its own."""
    if source.is_dir():
        return Path(shutil.copytree(source, target))
    target.mkdir()
    return Path(shutil.copy(source, target / "model.gguf"))


def _weights(model: Path) -> Path:
    return model if model.is_file() else next(path for pattern in WEIGHTS for path in model.glob(pattern))


async def _before_the_start(row: Row, whole: Path, directory: Path) -> None:
    short = _copy(whole, directory / "short")
    with _weights(short).open("r+b") as file:
        file.truncate(_weights(short).stat().st_size // 2)
    result = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "quire", "serve", str(short), "--port", "0"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = result.stderr.splitlines()
    plain = len(lines) == 1 and str(_weights(short)) in lines[0]
    row.check("truncated before: exit code (3), one line", result.returncode, passes=result.returncode == 3 and plain)


async def _in_service(row: Row, loss: str, model: Path) -> None:
    path = _weights(model)
    with serving(str(model)) as server:
        before = await ask(server.url, BODY)
        running = asyncio.create_task(ask(server.url, BODY))
        await asyncio.sleep(0.05)
        if loss == "removed":
            path.unlink()
        else:
            os.truncate(path, 0)
        seen = [await running, *[await ask(server.url, BODY) for _ in range(3)]]
        same = sum(item.is_good and item.text == before.text for item in seen)
        deaths = (await server.metrics()).value("quire_engine_deaths_total")
        row.check(f"{loss} in service: same answers", f"{same}/4", passes=same == 4 and not deaths)
        # An engine that must start again cannot; that is said, and the server ends instead of failing for ever.
        server.engine().kill()
        code = await server.wait(120)
        told = "the engine does not start again" in server.stderr and path.name in server.stderr
        row.check("then kill -9 of the engine: exit code (≠ 0), told", code, passes=bool(code) and told)


async def _without_writing(row: Row, model: str, blocked: Path) -> None:
    places = {name: str(blocked) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "QUIRE_CACHE_DIR", "TMPDIR")}
    for what, environment, prefix in (
        ("directories cannot be written", places, []),
        ("no file may grow", None, [sys.executable, "-c", NO_BYTES]),
    ):
        with serving(model, environment=environment, prefix=prefix) as server:
            seen = await ask(server.url, BODY)
            told = "quire ps will not know this server" in server.stderr
            row.check(f"{what}: serves, and says what is missing", seen.is_good, passes=seen.is_good and told)


async def _with_full_log(row: Row, model: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "quire", "serve", model, "--port", str(port), "--served-model-name", "soak"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(command, stdout=full, stderr=full)
    try:
        deadline_s = time.monotonic() + 60
        while (await get(url, "/health/ready")).status != 200 and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        seen: list[Seen] = [await ask(url, BODY) for _ in range(2)]
        good = sum(item.is_good for item in seen)
        row.check("log on a full disk: answers", f"{good}/2", passes=good == 2)
        process.terminate()
        code = await asyncio.to_thread(process.wait, 30)
        row.check("exit code (0)", code, passes=code == 0)
    finally:
        process.kill()
        process.wait()
