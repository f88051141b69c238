"""A real headless Chromium. Tests skip without one, except in CI.

The fixtures are closed after each module: Playwright's event loop would stop `asyncio.run` in later tests.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
LIMIT_MS = 60_000
OpenPage = Callable[..., Page]


def chromium() -> str | None:
    """Return the browser: the shell without windows opens a page in a third of the processor time."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    if path is None and "CI" not in os.environ:
        pytest.skip("needs Chromium: apt-get install chromium-headless-shell, or chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()


class SharedPage:
    """A page that the tests of a module use one after the other: a new one costs three processes.

    A test closes it that has added scripts to it or changed a quota: nothing else undoes that.
    """

    def __init__(self, browser: Browser) -> None:
        self._context = new_context(browser)
        self._page: Page | None = None

    def take(self) -> Page:
        if self._page is None or self._page.is_closed():
            self._page = self._context.new_page()
        return self._page

    def reset(self) -> None:
        """Leave the page empty: without storage, cookies, permissions, routes and other tabs."""
        for other in self._context.pages:
            if other is not self._page:
                other.close()
        if self._page is not None and not self._page.is_closed():
            self._page.unroute_all()
            self._page.evaluate("addEventListener('pagehide', () => sessionStorage.clear())")
            origin = self._page.evaluate("location.origin")
            self._page.goto("about:blank")  # a page saves its conversation when it is left, so it is left first
            client = self._context.new_cdp_session(self._page)
            client.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
            client.detach()
        self._context.clear_cookies()
        self._context.clear_permissions()
        self._context.set_offline(False)


@pytest.fixture(scope="module")
def shared_page(browser: Browser) -> SharedPage:
    return SharedPage(browser)


def new_context(browser: Browser, **options: Any) -> BrowserContext:
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    context.set_default_timeout(LIMIT_MS)
    return context


@pytest.fixture
def open_page(browser: Browser, shared_page: SharedPage) -> Iterator[OpenPage]:
    """Opens a URL; fails at the end for errors in the console and requests to elsewhere.

    The first page of a test is the module's, if it has no options; others have contexts of their own.
    """
    contexts: list[BrowserContext] = []
    watched: list[tuple[Page, dict[str, Callable[..., object]]]] = []
    problems: list[str] = []

    def open_it(url: str, *, offline: bool = False, allowed: tuple[str, ...] = (), **options: object) -> Page:
        if options or watched:
            contexts.append(new_context(browser, **options))
            page = contexts[-1].new_page()
        else:
            page = shared_page.take()
        page.context.set_offline(offline)
        listeners: dict[str, Callable[..., object]] = {
            "console": lambda message: message.type == "error" and not any(
                word in message.text for word in allowed) and problems.append(message.text),
            "pageerror": lambda error: problems.append(str(error)),
            "request": lambda request: request.url.startswith((url, "data:", "blob:")) or problems.append(request.url),
        }  # fmt: skip
        for event, listener in listeners.items():
            page.on(event, listener)  # type: ignore[call-overload]
        watched.append((page, listeners))
        page.goto(url)
        return page

    yield open_it
    for page, listeners in watched:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    shared_page.reset()
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="session")
def axe() -> str:
    """Return the source of axe-core, which finds faults of accessibility."""
    return (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
