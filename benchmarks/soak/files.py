"""F6 of the fault table: the model's file is truncated or removed, before the start and while the server serves.

Next to read: `src/quire/weights/model_files.py`.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.soak.client import ask, chat_body
from benchmarks.soak.row import Row
from benchmarks.soak.server import serving
from quire.weights.sources import resolve_source

BODY = chat_body("Tell me a story.", 40)
WEIGHTS = ("*.gguf", "*.safetensors")


async def lost_files(model: str) -> Row:
    """F6: each loss, before the start and while the server serves."""
    row = Row("F6", "model file truncated or removed")
    with tempfile.TemporaryDirectory() as directory:
        whole = _copy(Path(resolve_source(model, revision=None, progress=None).path), Path(directory) / "whole")
        await _before_the_start(row, whole, Path(directory))
        for loss in ("truncated", "removed"):
            await _in_service(row, loss, _copy(whole, Path(directory) / loss))
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
