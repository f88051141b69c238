"""The documentation is executed: `python` blocks of README and docs run, commands parse; options are documented."""

import re
import shlex
from collections import Counter
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import click
import pytest

from quire.cli.main import cli
from quire.sampling_params import SamplingParams
from tests.guards.shown_commands import Page
from tests.server.serving import serving

ROOT = Path(__file__).parents[2]
SERVER_URL = "http://127.0.0.1:8000"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TRANSLATIONS = {ROOT / "README.md": ROOT / "README.zh-CN.md", ROOT / "docs" / "use.md": ROOT / "docs" / "zh" / "use.md"}
"""Their blocks are those of the page, which run."""
MAX_FIRST_PAGE_LINES = 70
MAX_IMAGE_BYTES = 250_000
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


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_translation_has_the_blocks_headings_and_figures_of_its_page(page: Path) -> None:
    original, translation = Page.read(page), Page.read(TRANSLATIONS[page])
    assert translation.blocks() == original.blocks()
    assert translation.outline() == original.outline()
    assert images(translation) == images(original)
    assert [numbers(row) for row in rows(translation, "EPYC")] == [numbers(row) for row in rows(original, "EPYC")]


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_translation_has_the_terms_links_items_and_rows_of_its_page(page: Path) -> None:
    """A sentence that one of them lacks has a name, a link, an item or a row that the other one has."""
    parts = [parts_of(path) for path in (page, TRANSLATIONS[page])]
    for name, original in parts[0].items():
        translated = parts[1][name]
        assert translated == original, f"{name}: lacks {original - translated}, has besides {translated - original}"


def parts_of(page: Path) -> dict[str, Counter[str]]:
    """Terms in code, link targets, list items and table rows of a page, outside of blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    originals = {translation: original for original, translation in TRANSLATIONS.items()}
    links = Counter[str]()
    for target, anchor in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", text):
        path = (page.parent / target).resolve()
        links[target if "://" in target else f"{originals.get(path, path)}{anchor}"] += 1
    return {
        "terms": Counter(re.findall(r"`[^`]+`", text)),
        "links": links,
        "items": Counter(re.findall(r"^ *- ", text, re.MULTILINE)),
        "rows": Counter(str(line.count("|")) for line in text.splitlines() if line.startswith("|")),
    }


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_page_and_its_translation_link_to_each_other_below_the_title(page: Path) -> None:
    for here, there in ((page, TRANSLATIONS[page]), (TRANSLATIONS[page], page)):
        title, _, link = here.read_text().splitlines()[:3]
        assert title.startswith("# ")
        assert (here.parent / link.split("](")[1].rstrip(")")).resolve() == there


def images(page: Page) -> list[str]:
    return re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.text)


def rows(page: Page, word: str) -> list[str]:
    return [line for line in page.text.splitlines() if line.startswith("|") and word in line]


def numbers(text: str) -> list[str]:
    return re.findall(r"\d[\d.,]*", text)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "README.zh-CN.md"], ids=lambda page: page.name)
def test_first_page_fits_a_screen_and_shows_two_small_pictures(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MAX_FIRST_PAGE_LINES
    files = [ROOT / name for name in images(Page.read(page))]
    assert [file.name for file in files] == ["page.png", "tour.svg"]
    assert all(0 < file.stat().st_size < MAX_IMAGE_BYTES for file in files)


def shown_commands() -> list[str]:
    """The `quire …` lines of blocks fenced as `sh`, without settings before them and comments."""
    found = {}
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = re.match(r"(?:[A-Z_]+=\S+ )*(?:uvx --from \S+ )?(quire .*)", line)
                if command and not re.search(r"[…|<>]|\[OPTIONS\]", command[1]):
                    found[command[1]] = None
    return list(found)


@pytest.mark.parametrize("line", shown_commands())
def test_shown_command_line_is_one_that_quire_takes(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)[1:]
    for word in words:
        if re.fullmatch(r"[\w./-]+\.(json|jsonl|gguf|txt|gbnf)", word):  # some options read their file at once
            Path(word).write_text("[]")
    root = click.Context(cli, info_name="quire")
    name, command, rest = cli.resolve_command(root, words)
    assert command is not None
    with command.make_context(name, rest, parent=root):
        pass


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
    for page in [*PAGES, *TRANSLATIONS.values(), *LEARN_PAGES]:
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
