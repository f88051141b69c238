"""A real headless Chromium. Tests skip without one, except in CI.

The fixtures are closed after each module: Playwright's event loop would stop `asyncio.run` in later tests.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
LIMIT_MS = 60_000
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None and "CI" not in os.environ:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens a URL in a context of its own; fails at the end for errors in the console and requests to elsewhere."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def open_it(url: str, *, offline: bool = False, allowed: tuple[str, ...] = (), **options: object) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, "offline": offline, **options})
        contexts.append(context)
        context.set_default_timeout(LIMIT_MS)
        page = context.new_page()
        page.on("console", lambda message: message.type == "error" and not any(
            word in message.text for word in allowed) and problems.append(message.text))  # fmt: skip
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith((url, "data:", "blob:")) or problems.append(request.url)
        )
        page.goto(url)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the source of axe-core, which finds faults of accessibility."""
    return (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
