"""Markdown and formulas of answers in a real browser, drawn by the page's own module."""

import pytest
from playwright.sync_api import Page

from tests.page.conftest import OpenPage
from tests.server.serving import Serving

DRAW = """async (text) => {
  const { Markdown } = await import("/page/markdown.js");
  const { html, render } = await import("/page/xray.js");
  const box = document.createElement("div");
  document.getElementById("log").replaceChildren(box);
  render(html`<${Markdown} text=${text} />`, box);
}"""


@pytest.fixture
def page(tiny_server: Serving, open_page: OpenPage) -> Page:
    """Return a page that adds nothing to its log any more: it has fetched the story."""
    page = open_page(tiny_server.url)
    page.locator("#log .story").wait_for()
    return page


def draw(page: Page, text: str) -> None:
    page.evaluate(DRAW, text)


def test_formulas_of_all_four_marks_are_drawn(page: Page) -> None:
    draw(
        page,
        "Roots: $x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$ and \\(a_i^2\\).\n\n"
        "$$\\sum_{i=1}^n i$$\n\n- \\[\n\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}\n\\]\n",
    )
    assert page.locator("#log math").count() == 4
    assert page.locator("#log math[display=block]").count() == 2
    assert page.locator("#log mfrac msqrt").count() == 1
    assert page.locator("#log msubsup").text_content() == "ai2"
    assert page.locator("#log munderover").count() == 1
    assert page.locator("#log li mtr").count() == 2
    # A fraction stands above its denominator: the browser lays MathML out.
    above, below = (page.locator("#log mfrac > *").nth(i).bounding_box() for i in range(2))
    assert above is not None
    assert below is not None
    assert above["y"] + above["height"] <= below["y"] + 1


def test_dollars_that_are_no_formula_stay(page: Page) -> None:
    for text in (
        "It costs $5 and $10.", "From $5-$10", "a $ b", "`$x$`", "```\n$$x$$\n```", "\\$x\\$", "open $x", "$$ $$",
    ):  # fmt: skip
        draw(page, text)
        assert page.locator("#log math").count() == 0, text
        assert "$" in page.locator("#log .markdown").inner_text(), text


def test_tex_that_is_unknown_or_hostile_is_text(page: Page) -> None:
    for tex in (
        "\\href{javascript:alert(1)}{x}",
        "\\text{<img src=x onerror=alert(1)>}",
        "<script>alert(1)</script>",
        "\\unknown",
        "{" * 200,
        "\\begin{pmatrix} 1",
        "\\mathbb{<b>}",
        "x^",
    ):
        draw(page, f"${tex}$ and\n\n$$\n{tex}\n$$")
        assert page.locator("#log").locator("script, img, a, b").count() == 0, tex
        assert page.locator("#log .markdown").inner_text().strip(), tex


def test_code_has_its_language_and_a_button_and_wide_tables_scroll(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    wide = " | ".join(f"column{i}" for i in range(40))
    draw(page, f"```python title\nprint(1)\n```\n\n| {wide} |\n|{'-|' * 40}\n| {wide} |\n")
    assert page.locator(".fence-bar span").inner_text() == "python"
    page.get_by_role("button", name="Copy code").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)\n"
    widths = page.locator("#log .scroll").evaluate("box => [box.scrollWidth, box.clientWidth]")
    assert widths[0] > widths[1]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
