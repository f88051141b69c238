"""Pictures of README.md: `python -m tests.page.pictures [FOLDER]` draws them anew, from a real server and a real tour.

`page.png` is the page of `quire serve` after a chat, `tour.svg` the beginning of `quire tour` in a terminal.
"""

import re
import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from tests.page.conftest import FLAGS, LIMIT_MS, chromium
from tests.server.serving import serving

IMAGES = Path(__file__).parents[2] / "docs" / "images"
PROMPT = "Why is the sky blue?"
WIDTH, HEIGHT = 1280, 742
COLUMNS, ROWS = 118, 32
CELL_WIDTH, LINE_HEIGHT, MARGIN = 7.8, 18, 16
TITLE, WHY = ' font-weight="bold" fill="#ffffff"', ' fill="#8fb7e8"'
SPACE = "\N{NO-BREAK SPACE}"
"""Others collapse in SVG."""
BOLD = re.compile(r"\x1b\[1m(.*)\x1b\[0m")


def draw_page(file: Path) -> None:
    """Chat with SmolLM2 on the page of a server, and take a picture of chat and KV blocks."""
    with serving("smollm2", "--xray-text", name="smollm2") as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=[*FLAGS])
        page = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}).new_page()
        page.set_default_timeout(LIMIT_MS)
        page.goto(server.url)
        chat(page)
        page.screenshot(path=file)
        browser.close()


def chat(page: Page) -> None:
    """Ask the question, open the pane of KV blocks, and point at a token of the answer."""
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_text("Parameters").click()
    page.get_by_label("max_tokens").fill("72")
    page.get_by_text("Parameters").click()
    page.get_by_label("Message", exact=True).fill(PROMPT)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".stats").last).to_contain_text("tokens/s", timeout=LIMIT_MS)
    page.get_by_role("tab", name="KV").click()
    page.locator(".token").nth(40).click()
    expect(page.locator(".block").first).to_be_visible()
    page.locator(".token").nth(40).hover()
    expect(page.locator(".token-panel")).to_contain_text("probability")


def draw_tour(file: Path) -> None:
    """Run the tour and draw the first lines that it prints, broken at the edge of the terminal."""
    command = [sys.executable, "-m", "quire", "--color", "always", "tour", PROMPT]
    printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    lines = [(f'$ quire tour "{PROMPT}"', "")]
    for line in printed.splitlines():
        bold = BOLD.fullmatch(line)
        text = bold[1] if bold else line
        style = TITLE if bold else WHY if text.lstrip().startswith("why:") else ""
        lines += [(part, style) for part in textwrap.wrap(text, COLUMNS, subsequent_indent="   ") or [""]]
    file.write_text(terminal_svg(lines[:ROWS]))


def terminal_svg(lines: list[tuple[str, str]]) -> str:
    """Return a picture of lines, each with the attributes of its style."""
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, len(lines) * LINE_HEIGHT + 2 * MARGIN
    rows = []
    for index, (text, style) in enumerate(lines):
        y = MARGIN + LINE_HEIGHT * (index + 0.75)
        rows.append(f'<text x="{MARGIN}" y="{y:g}"{style}>{escape(text.replace(" ", SPACE))}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    font = 'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13"'
    back = f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#16181d"/>'
    return "\n".join([head, back, f'<g fill="#d7dae0" {font}>', *rows, "</g>", "</svg>", ""])


def main() -> None:
    """Draw both pictures into the folder that the command line names, or into the documentation's."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    draw_tour(folder / "tour.svg")
    draw_page(folder / "page.png")


if __name__ == "__main__":
    main()
