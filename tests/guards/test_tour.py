"""One token through the engine: the table in docs/architecture.md against one step of a small random model."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from quire.engine.llm_engine import LLMEngine
from quire.kernels import registry
from quire.sampling_params import SamplingParams
from tests.cli.tiny_directory import make_tiny_directory

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "quire"


@pytest.fixture(autouse=True)
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("QUIRE_KERNELS", "reference")
    registry.forget_choices()
    yield
    monkeypatch.undo()
    registry.forget_choices()


def stations() -> list[tuple[str, str]]:
    """(file, the function named first), in the table's order."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## One token through the engine")[1]
    return re.findall(r"^\| \d+ \| \[`(.+?)`\].* \| `(.+?)`", section.split("\n## ")[0], flags=re.MULTILINE)


def functions_entered(engine: LLMEngine) -> list[tuple[str, str]]:
    """(file, qualified name) of the package's functions in one step, in the order of their first call."""
    entered: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            entered[str(path.relative_to(PACKAGE)), frame.f_code.co_qualname] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(before)
    return list(entered)


def test_the_table_is_the_way_of_a_token(tmp_path: Path) -> None:
    engine = LLMEngine.from_options(
        str(make_tiny_directory(tmp_path)), load_format="dummy", dtype="float32", num_blocks_override=16
    )
    engine.add_request("a", "hello", SamplingParams(max_tokens=2, ignore_eos=True))
    expected = stations()
    assert len(expected) == 9
    assert [function for function in functions_entered(engine) if function in expected] == expected
