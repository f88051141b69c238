"""The documentation is executed: every `python` block of README and docs runs; every option is documented."""

import re
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import pytest

from quire.sampling_params import SamplingParams
from tests.guards.shown_commands import Page
from tests.server.serving import serving

ROOT = Path(__file__).parents[2]
SERVER_URL = "http://127.0.0.1:8000"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATED_README = ROOT / "README.zh-CN.md"
"""Its blocks are those of README.md, which run."""
LEARN_PAGES = sorted((ROOT / "docs" / "learn").rglob("*.md"))
"""`test_learn.py` runs their blocks."""


def python_blocks() -> list[tuple[str, str]]:
    """Blocks fenced as `python`; a block fenced as `py` is a fragment and is not run."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found += [(f"{page.name}-{i}", block) for i, block in enumerate(blocks)]
    return found


@pytest.mark.model
@pytest.mark.parametrize(("name", "block"), python_blocks(), ids=[name for name, _ in python_blocks()])
def test_python_blocks_run(name: str, block: str, smollm2_path: Path) -> None:
    scope: dict[str, object] = {"__name__": "__docs__"}
    with ExitStack() as stack:
        if SERVER_URL in block:
            block = block.replace(SERVER_URL, stack.enter_context(serving("smollm2", name="smollm2")).url)
        exec(compile(block, name, "exec"), scope)
    assert len(scope) > 1, "the block defines or imports something"


def test_readme_opens_with_the_two_commands() -> None:
    first_block = re.search(r"^```.*?\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert first_block is not None
    assert [line.split()[:2] for line in first_block[1].splitlines()] == [["make", "run"], ["make", "test"]]


def test_translated_readme_has_the_blocks_and_headings_of_the_readme() -> None:
    original, translation = Page.read(ROOT / "README.md"), Page.read(TRANSLATED_README)
    assert translation.blocks() == original.blocks()
    assert translation.outline() == original.outline()


def test_readme_and_its_translation_link_to_each_other_below_the_title() -> None:
    for page, other in ((ROOT / "README.md", TRANSLATED_README), (TRANSLATED_README, ROOT / "README.md")):
        title, _, link = page.read_text().splitlines()[:3]
        assert title == "# Quire"
        assert link.endswith(f"]({other.name})")


def test_every_environment_variable_is_documented() -> None:
    python, native = (ROOT / "src").rglob("*.py"), (ROOT / "native").rglob("*.cpp")
    named = {name for path in python for name in re.findall(r"(?<![\w-])QUIRE_[A-Z_]+", path.read_text())}
    # Without quotes it is a macro.
    named |= {name for path in native for name in re.findall(r'"(QUIRE_[A-Z_]+)"', path.read_text())}
    assert "QUIRE_ISA" in named
    text = (ROOT / "docs" / "cli.md").read_text()
    assert sorted(name for name in named if name not in text) == []


def test_every_sampling_field_is_documented() -> None:
    text = SamplingParams.__doc__ or ""
    assert [item.name for item in fields(SamplingParams) if not re.search(rf"\b{item.name}\b", text)] == []


def test_links_between_pages_resolve() -> None:
    broken = []
    for page in [*PAGES, TRANSLATED_README, *LEARN_PAGES]:
        for target, anchor in re.findall(
            r"\]\(([^)#]*)(#[^)]*)?\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        ):
            if "://" in target:
                continue
            named = page.parent / target if target else page
            if not named.exists() or (anchor and anchor not in anchors_of(named)):
                broken.append(f"{page.name}: {target}{anchor}")
    assert broken == []


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_reference_has_no_paragraph_that_is_shown_as_code() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("    ")] == []
