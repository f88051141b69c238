"""A real headless Chromium and servers, which the tests of this folder share. Tests skip without one, except in CI."""

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.cli.tiny_directory import make_tiny_directory
from tests.server.serving import Serving, serving

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
LIMIT_MS = 60_000
SCREEN: dict[str, Any] = {
    "viewport": {"width": 1280, "height": 800}, "color_scheme": "light", "reduced_motion": "no-preference",
}  # fmt: skip
"""What a page can change without a new context."""
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
COLOUR_RULES = ["color-contrast", "link-in-text-block"]
"""Rules that a theme can break: style.css tells the themes apart with `light-dark()`, which has only colours."""
OpenPage = Callable[..., Page]
Opened = Callable[..., Any]
OPENED = pytest.StashKey[Opened]()


def chromium() -> str | None:
    """Return the browser: the shell without windows opens a page in a third of the processor time."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Opened:
    """Return a function that opens a context manager once, until the last test of this folder has run.

    They are not kept for longer: Playwright's event loop would stop `asyncio.run` in later tests.
    """
    folder = request.node.getparent(pytest.Dir)
    if OPENED not in folder.stash:
        stack = contextlib.ExitStack()

        @functools.cache
        def enter(open_it: Callable[..., contextlib.AbstractContextManager[Any]], *args: Any, **options: Any) -> Any:
            return stack.enter_context(open_it(*args, **options))

        folder.stash[OPENED] = enter

        def close() -> None:
            del folder.stash[OPENED]
            stack.close()

        folder.addfinalizer(close)
    function: Opened = folder.stash[OPENED]
    return function


@pytest.fixture
def smollm2_server(smollm2_path: Path, opened: Opened) -> Serving:
    """Return a server of SmolLM2 whose recorded steps have text."""
    server: Serving = opened(serving, "smollm2", "--xray-text", name="smollm2")
    return server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture
def tiny_server(tiny_model: Path, opened: Opened) -> Serving:
    server: Serving = opened(serving, tiny_model, "--kv-cache-memory-bytes", "4MiB")
    return server


class SharedPage:
    """A page that the tests use one after the other: a new one costs three processes.

    A test closes it that has added scripts to it or changed a quota: nothing else undoes that.
    """

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self._context = new_context(browser)
        self._page: Page | None = None

    def take(self, *, viewport: dict[str, int], **media: Any) -> Page:
        if self._page is None or self._page.is_closed():
            self._page = self._context.new_page()
        self._page.set_viewport_size(viewport)  # type: ignore[arg-type]
        self._page.emulate_media(**media)
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


@contextlib.contextmanager
def shared_page() -> Iterator[SharedPage]:
    """Start a browser with a page."""
    path = chromium()
    if path is None and "CI" not in os.environ:
        pytest.skip("needs Chromium: apt-get install chromium-headless-shell, or chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield SharedPage(browser)
        browser.close()


def new_context(browser: Browser, **options: Any) -> BrowserContext:
    context = browser.new_context(**SCREEN | options)
    context.set_default_timeout(LIMIT_MS)
    return context


@pytest.fixture
def open_page(opened: Opened) -> Iterator[OpenPage]:
    """Opens a URL; fails at the end for errors in the console and requests to elsewhere.

    The first page of a test is the shared one, unless its options need a context of their own, as others have.
    """
    shared: SharedPage = opened(shared_page)
    contexts: list[BrowserContext] = []
    watched: list[tuple[Page, dict[str, Callable[..., object]]]] = []
    problems: list[str] = []

    def open_it(url: str, *, offline: bool = False, allowed: tuple[str, ...] = (), **options: object) -> Page:
        if watched or not options.keys() <= SCREEN.keys():
            contexts.append(new_context(shared.browser, **options))
            page = contexts[-1].new_page()
        else:
            page = shared.take(**SCREEN | options)
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
    shared.reset()
    for context in contexts:
        context.close()
    assert problems == []


def check_axe(page: Page, state: str, *, within: str = "html", without: str = "template") -> None:
    """Check in both themes that axe-core finds no fault of accessibility. `without`: what an earlier state has had."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text())
    context = {"include": [[within]], "exclude": [[without]]}
    for scheme, rules in (("light", None), ("dark", COLOUR_RULES)):
        page.emulate_media(color_scheme=scheme)
        options = {"resultTypes": ["violations"], **({} if rules is None else {"runOnly": rules})}
        found = page.evaluate("(given) => axe.run(...given)", [context, options])["violations"]
        problems = [(item["id"], item["nodes"][0]["html"], item["nodes"][0]["failureSummary"]) for item in found]
        assert problems == [], (state, scheme)
