"""Every verb starts and ends in a process of its own, and writes nothing to stderr but its notes or its one error.

The native module reports objects that are alive at exit: a process that keeps one fails here.
"""

import json
import re
import signal
import subprocess
import sys

import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.server_process import ServerProcess, quire_serve
from quire.cli.main import all_verbs
from tests.cli.batch_inputs import request, write_lines
from tests.cli.command_line import call_process
from tests.cli.tiny_directory import make_tiny_directory

STARTED = r"(loading weights .*\n)*{tiny} · LlamaForCausalLM · .* · ready in .*\n"
ENDED = r"\[length\] prompt .*\n"
LACKS = r"error\[model_file_invalid\]: the checkpoint lacks tensor norm.weight: .*\n"
SIZES = "--max-tokens 3 --ignore-eos"
TRACED = (
    "trace hi --model {tiny} --max-tokens 2 -o {out}/t.jsonl -q && trace {out}/t.jsonl -o {out}/t.json -q"
    " && view ops {out}/t.jsonl -q"
)
LINES: dict[str, tuple[int, str]] = {
    f"run {{tiny}} hi {SIZES}": (0, STARTED + ENDED),
    f"run {{tiny}} hi {SIZES} --load-format dummy": (0, STARTED + ENDED),
    f"run {{tiny}} hi {SIZES} --tensor-parallel-size 2 -q": (0, ""),
    "run {lacks} hi --raw": (3, LACKS),
    "run {lacks} hi --raw --tensor-parallel-size 2": (3, LACKS),
    "batch {lines} -o {out}/a.jsonl --model {tiny} -q": (0, ""),
    "batch {lines} -o {out}/b.jsonl --model {lacks} -q": (3, LACKS),
    "bench {tiny} -p 8 -n 2 -r 1": (0, STARTED),
    "cache clear {out} --yes -q": (0, ""),
    "cache ls {out} -q": (0, ""),
    "cache verify {out} -q": (0, ""),
    "compare batching --requests 4 -q": (0, ""),
    "completion bash": (0, ""),
    "doctor -q": (0, ""),
    "explain {tiny} --ctx 64 --measure -q": (0, ""),
    "learn": (0, ""),
    "learn check pairs 3600": (0, ""),
    "learn show pairs": (0, ""),
    "ls": (0, r"no models yet .*\n"),
    "ps": (0, r".*\n"),
    "pull {tiny} -q": (0, ""),
    "quantize {tiny} {out}/x.gguf --type BF16 -q": (0, ""),
    "rm nothing": (3, r"error\[model_not_found\]: .*\n"),
    "serve {lacks} --port 0": (3, LACKS),
    "show {tiny}": (0, ""),
    "tokenize {tiny} hi -q": (0, ""),
    "tour hi --model {tiny} -q": (0, ""),
    TRACED: (0, ""),
    "trace hi --model {tiny} --max-tokens 2 -o {out}/p.json --torch-profiler --enforce-eager -q": (0, ""),
    "tune {tiny} -q": (2, r"error\[invalid_option\]: a context of 128 tokens is too short .*\n"),
    "version": (0, ""),
}
"""Command lines, one after the other → exit code, and a pattern of stderr, of each."""
SERVED = (
    "bench serve --url {url} -c 1 --requests 1 --prompt 2 --gen 2 -q",
    "chat hi --url {url} --max-tokens 2 -q",
    "top --url {url} --once --interval-s 0.1 -q",
    "trace --attach --url {server} --seconds 0.1 -o {out}/s.jsonl -q",
)
INTERRUPTED = (
    "run {tiny} hi", "bench {tiny} -p 8 -n 2", "tour hi --model {tiny}", "trace hi --model {tiny} -o {out}/i.jsonl",
    "explain {tiny} --ctx 64 --measure", "tune {long} -q",
)  # fmt: skip
INTERRUPTS = """
import os, signal
from quire.__main__ import main
from quire.runtime import machine_limits
from quire.scheduler.scheduler import Scheduler

machine_limits.MIN_MEASURE_S, machine_limits.READ_BYTES = 0.0, 1 << 24
schedule = Scheduler.schedule

def interrupt(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)
    return schedule(*arguments, **options)

Scheduler.schedule = interrupt
main()
"""
LEAKS = """
import ctypes
from quire import _native

ctypes.pythonapi.Py_IncRef(ctypes.py_object(_native.ThreadPool(1)))
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what command lines name in braces."""
    out = tmp_path_factory.mktemp("out")
    models = {name: make_tiny_directory(out / name) for name in ("tiny", "lacks")}
    models["long"] = make_tiny_directory(out / "long", max_position_embeddings=2048)
    weights = load_file(models["lacks"] / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, models["lacks"] / "model.safetensors")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    lines = write_lines(out / "lines", request("a", body=body))
    return {name: str(path) for name, path in {**models, "lines": lines, "out": out}.items()}


@pytest.mark.parametrize("line", LINES)
def test_verb_writes_its_notes_or_its_error_and_nothing_else(places: dict[str, str], line: str) -> None:
    code, pattern = LINES[line]
    for part in line.format_map(places).split(" && "):
        result = call_process(*part.split())
        assert result.returncode == code, result.stderr
        assert re.fullmatch(pattern.format_map({name: re.escape(path) for name, path in places.items()}), result.stderr)


def test_servers_and_their_clients_write_their_log_and_nothing_else(places: dict[str, str]) -> None:
    server = ServerProcess(quire_serve(places["tiny"], "--log-format", "json", name="tiny"))
    try:
        for line in SERVED:
            result = call_process(*line.format(server=server.url, url=server.url, **places).split())
            assert (result.returncode, result.stderr) == (0, ""), line
        server.signal(signal.SIGINT)
        assert server.join() == 0
        assert [line for line in server.lines if not isinstance(json.loads(line), dict)] == []
    finally:
        server.kill()


@pytest.mark.parametrize("line", INTERRUPTED)
def test_interrupted_verb_writes_no_traceback(places: dict[str, str], line: str) -> None:
    command = [sys.executable, "-c", INTERRUPTS, *line.format_map(places).split(), "-q"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert (result.returncode, result.stderr) == (130, "")


def test_native_object_that_is_alive_at_exit_is_reported() -> None:
    """All else here would hold in any case if it were not. Builds for users, of which wheels are made, report none."""
    result = subprocess.run([sys.executable, "-c", LEAKS], capture_output=True, text=True, check=True)
    assert "nanobind: leaked 1 instances" in result.stderr, "build the checkout as editable: pip install -e ."


def test_every_verb_is_started_here() -> None:
    lines = (*" && ".join(LINES).split(" && "), *SERVED, "route", "serve")
    assert [verb for verb in all_verbs() if not any(f"{line} ".startswith(f"{verb} ") for line in lines)] == ["diff"]
