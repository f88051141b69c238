"""docs/learn is executed: its commands and Python blocks print what is shown, its figures are what they draw."""

import re
from pathlib import Path

import pytest

from tests.guards.shown_commands import FIGURES, Page, run_page, write

LEARN = Path(__file__).parents[2] / "docs" / "learn"
PAGES = sorted(LEARN.glob("*.md"))
NUM_TRIES = 3
"""Whether drafts are worth their time is measured while they are made: on a busy machine they may not be."""
TRANSLATIONS = sorted((LEARN / "zh").glob("*.md"))


@pytest.mark.model
@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_page_shows_what_its_commands_print(path: Path, smollm2_path: Path) -> None:
    page = Page.read(path)
    for _ in range(NUM_TRIES):
        all_printed, figures = run_page(page, brief=True)
        if all(shown.start < 0 or shown.equals(printed) for shown, printed in all_printed if shown.is_measured):
            break
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


MEASURED = """# A page

```python
import time
from pathlib import Path

print(now := time.time_ns())
_ = Path("figures/now.svg").write_text(str(now))
```

```text measured
```

![now](figures/now.svg)
"""


def test_measured_figure_and_table_of_a_page_come_from_one_run(tmp_path: Path) -> None:
    page, figure = tmp_path / "page.md", tmp_path / FIGURES / "now.svg"
    page.write_text(MEASURED)
    write(page)
    first = figure.read_text()
    assert f"\n{first}\n```" in page.read_text()
    write(page)
    assert figure.read_text() == first, "nothing but numbers has changed"
    assert f"\n{first}\n```" in page.read_text()
    figure.unlink()
    write(page)
    assert figure.read_text() != first
    assert f"\n{figure.read_text()}\n```" in page.read_text()


def test_every_page_has_a_translation() -> None:
    assert [path.name for path in TRANSLATIONS] == [path.name for path in PAGES]
