"""One token through the engine: the tables in docs/architecture.md against one step of a small random model."""

import asyncio
import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from quire.engine.llm_engine import LLMEngine
from quire.sampling_params import SamplingParams
from tests.cli.tiny_directory import make_tiny_directory
from tests.server.served import serving

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "quire"
MAX_FILES = {"off": 20, "auto": 22}
"""By `speculative`: drafts are two files more."""
MAX_FILES_OF_A_CHAT = 49
"""It may only become smaller."""


def stations(heading: str) -> list[list[tuple[str, str]]]:
    """Per table of a section: (file, the function named first), in order."""
    section = (ROOT / "docs" / "architecture.md").read_text().split(f"## {heading}")[1].split("\n## ")[0]
    tables = section.split("| # |")[1:]
    return [re.findall(r"^\| \d+ \| \[`(.+?)`\].* \| `(.+?)`", table, flags=re.MULTILINE) for table in tables]


@contextlib.contextmanager
def noting(*threads: str) -> Iterator[dict[tuple[str, str], None]]:
    """Collect (file, qualified name) of the package's functions that this thread enters, in the order of their first
    call. `threads`: beginnings of the names of threads that start meanwhile and count too."""
    entered: dict[tuple[str, str], None] = {}
    own = threading.current_thread()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            thread = threading.current_thread()
            if thread is own or thread.name.startswith(threads):
                entered[str(path.relative_to(PACKAGE)), frame.f_code.co_qualname] = None

    before = sys.getprofile()
    sys.setprofile(note)
    threading.setprofile(note if threads else None)
    try:
        yield entered
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def functions_entered(action: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return what `noting` collects of a call."""
    with noting() as entered:
        action()
    return list(entered)


def make_engine(directory: Path, params: SamplingParams | None = None, **options: Any) -> LLMEngine:
    engine = LLMEngine.from_options(str(directory), dtype="float32", device="cpu", num_blocks_override=16, **options)
    engine.add_request("a", "hello", params or SamplingParams(max_tokens=2, ignore_eos=True))
    return engine


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("tiny"))


def test_table_is_the_way_of_a_token(directory: Path) -> None:
    (expected,) = stations("One token through the engine")
    assert len(expected) == 10
    entered = functions_entered(make_engine(directory).step)
    assert [function for function in entered if function in expected] == expected


@pytest.mark.parametrize("speculative", MAX_FILES)
def test_greedy_decode_step_enters_few_files(directory: Path, speculative: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = make_engine(directory, params, speculative=speculative)
    engine.step()
    engine.step()
    files = list(dict.fromkeys(file for file, _ in functions_entered(engine.step)))
    print(f"a greedy planned decode step enters {len(files)} files:", *files, sep="\n  ")
    assert len(files) <= MAX_FILES[speculative], files


def test_table_is_the_way_of_a_model_to_its_plan(directory: Path) -> None:
    expected, *_ = stations("Three ways to run a model")
    assert len(expected) == 7
    entered = functions_entered(lambda: make_engine(directory))
    assert [function for function in entered if function in expected] == expected


def test_table_is_the_way_op_by_op(directory: Path) -> None:
    (planned,), (*_, eager) = stations("One token through the engine"), stations("Three ways to run a model")
    expected = planned[:6] + eager + planned[8:]
    entered = functions_entered(make_engine(directory, enforce_eager=True).step)
    assert [function for function in entered if function in expected] == expected


def test_table_is_the_way_of_a_device_plan(directory: Path) -> None:
    pytest.importorskip("torch")
    _, expected, _ = stations("Three ways to run a model")
    assert len(expected) == 6
    here = [(file, name.replace("Triton", "Host")) for file, name in expected]  # the sampler without a card
    entered = functions_entered(lambda: make_engine(directory, gpu_kernels="reference").step())
    assert [function for function in entered if function in here] == here


def test_table_of_serving_names_what_is_there() -> None:
    (table,) = stations("Serving")
    assert len(table) == 8
    for file, function in table:
        path = PACKAGE / file if (PACKAGE / file).is_file() else PACKAGE / file / "__init__.py"
        name = function.split(".")[-1].split("(")[0]
        assert re.search(rf"\b(def|class) {name}\b", path.read_text()), f"{file}: no {function}"


def test_streamed_chat_enters_few_files() -> None:
    """The HTTP process's, with the threads that prepare requests; what is made once is made before."""

    async def chat() -> list[str]:
        async with serving() as served:
            with noting("quire-text") as entered:
                await served.chat(stream=True)
                await served.until_idle()
                entered.clear()
                answer = await served.chat(stream=True)
            assert answer.status == 200
        return list(dict.fromkeys(file for file, _ in entered))

    files = asyncio.run(chat())
    print(f"a streamed chat enters {len(files)} files of the HTTP process:", *files, sep="\n  ")
    assert {"server/gate.py", "text/dialogue.py", "server/streaming.py"} <= set(files)
    assert len(files) <= MAX_FILES_OF_A_CHAT, files
