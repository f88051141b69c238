"""docs/learn is executed: its commands and Python blocks print what is shown, its figures are what they draw."""

import re
from pathlib import Path

import pytest

from tests.guards.shown_commands import FIGURES, Page, run_page

LEARN = Path(__file__).parents[2] / "docs" / "learn"
PAGES = sorted(LEARN.glob("*.md"))
TRANSLATIONS = sorted((LEARN / "zh").glob("*.md"))


@pytest.mark.model
@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_page_shows_what_its_commands_print(path: Path, smollm2_path: Path) -> None:
    page = Page.read(path)
    all_printed, figures = run_page(page)
    for shown, printed in all_printed:
        assert shown.start < 0 or shown.equals(printed), f"{shown.source}\nprints\n{printed}"
    for name, figure in figures.items():
        kept = (LEARN / FIGURES / name).read_bytes()
        assert figure.is_measured or figure.data == kept, f"{name} is stale: run `make docs`"
    assert sorted(figures) == sorted(set(page.figures()))


def test_every_figure_is_shown_on_a_page() -> None:
    shown = {name for path in PAGES for name in Page.read(path).figures()}
    assert {path.name for path in (LEARN / FIGURES).iterdir()} == shown


@pytest.mark.parametrize("path", TRANSLATIONS, ids=[path.stem for path in TRANSLATIONS])
def test_translation_has_the_blocks_and_figures_of_its_page(path: Path) -> None:
    original, translation = Page.read(LEARN / path.name), Page.read(path)
    assert translation.blocks() == original.blocks()
    assert translation.figures() == original.figures()
    assert translation.outline() == original.outline()


def test_page_on_online_softmax_names_the_sizes_of_the_kernel() -> None:
    source = (LEARN.parents[1] / "native" / "ops" / "attend_state.h").read_text()
    sizes = {name: int(value) for name, value in re.findall(r"(kTileTokens|kAttendRows) = (\d+)", source)}
    text = (LEARN / "19-online-softmax.md").read_text()
    assert f"**tiles** of {sizes['kTileTokens']} positions" in text
    assert f"up to {sizes['kAttendRows']} rows of one KV head" in text


def test_every_page_has_a_translation() -> None:
    assert [path.name for path in TRANSLATIONS] == [path.name for path in PAGES]
