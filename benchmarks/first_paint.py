"""Time until a browser shows the page: its first contentful paint, and until the chat can be used.

    python -m benchmarks.first_paint [--model smollm2] [--repetitions 10] [--json]

A server of a small model answers; Chromium opens the page in a new context each time, so that nothing is in its cache.
"box" is the time until the box for the message is there, which the page's own modules draw. Both are measured by the
page from its navigation on, at 1280 × 800. Rows: the server idle, and with eight requests that decode.
Next to read: `../src/quire/page/index.html`.
"""

import contextlib
import json
import shutil
import statistics
import sys
import threading
import urllib.request
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from benchmarks.command_line import Table, make_parser
from benchmarks.server_process import ServerProcess, quire_serve
from quire_workshop.load_client import percentile

MOST_MS = 300.0
NUM_STREAMS, STREAM_TOKENS = 8, 4000
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
PAINT = """() => new Promise((done) => {
  const found = () => performance.getEntriesByName("first-contentful-paint")[0];
  if (found()) return done(found().startTime);
  new PerformanceObserver(() => found() && done(found().startTime)).observe({ type: "paint", buffered: true });
})"""


def main() -> int:
    """Print the rows. Returns: 6 if the first paint of an idle server's page takes longer than 300 ms."""
    parser = make_parser(__doc__, "model", "json")
    parser.add_argument("--repetitions", type=int, default=10, help="times the page is opened  [%(default)s]")
    arguments = parser.parse_args()
    path = shutil.which("chromium")
    if path is None:
        sys.exit("this needs Chromium: apt-get install chromium")
    table = Table(
        {"server": "", "paint ms p50": ".0f", "paint ms p95": ".0f", "box ms p50": ".0f"}, as_json=arguments.json
    )
    server = ServerProcess(quire_serve(arguments.model, name="served"))
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
            _open(browser, server.url)  # the browser's own start is not the page's
            medians = []
            for name in ("idle", f"{NUM_STREAMS} requests decode"):
                if name != "idle":
                    threading.Thread(target=_decode, args=(server.url,), daemon=True).start()
                times = [_open(browser, server.url) for _ in range(arguments.repetitions)]
                paints, boxes = [paint for paint, _ in times], [box for _, box in times]
                medians.append(statistics.median(paints))
                table.row(name, medians[-1], percentile(paints, 95), statistics.median(boxes))
            browser.close()
    finally:
        server.kill()
    return 0 if medians[0] <= MOST_MS else 6


def _open(browser: Browser, url: str) -> tuple[float, float]:
    """Return the milliseconds until the first paint and until the box is there."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.add_init_script(
        """new MutationObserver(() => { if (document.querySelector("textarea")) window.boxAt ??= performance.now(); })
          .observe(document, { childList: true, subtree: true });"""
    )
    page.goto(url)
    page.locator(".chat > form textarea").wait_for()
    times = page.evaluate(PAINT), page.evaluate("window.boxAt")
    context.close()
    return times


def _decode(url: str) -> None:
    """Keep requests running; the server's end is theirs."""
    body: dict[str, Any] = {"model": "served", "prompt": ["Once"] * NUM_STREAMS, "max_tokens": STREAM_TOKENS}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request).read()


if __name__ == "__main__":
    raise SystemExit(main())
