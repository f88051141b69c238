"""A trace as one HTML file that opens from disk, without a network: the live page's own drawing code and style inlined.

Next to read: `../page/xray.js`, which replays and draws; `../page/trace.html`, the frame.
"""

import base64
import functools
import json
from importlib.resources import files

from quire.insight.trace import EngineTrace

TRACE_MARK = "/*trace*/"
"""Place of the lines in `template`. The page, which saves traces too, replaces it in the same way."""


def to_html(trace: EngineTrace) -> str:
    """Return the whole page. It does not draw the slices of `torch.profiler`, which would be most of the file."""
    lines = "\n".join(json.dumps(line) for line in trace.lines if line.get("kind") != "torch")
    # Within JSON "<" stands only in strings: escaped, no text can end the script element.
    return template().replace(TRACE_MARK, lines.replace("<", "\\u003c"))


@functools.cache
def template() -> str:
    """Return the page without its trace."""
    folder = files("quire") / "page"
    vendored = ("preact.js", "htm.js")
    imports = {
        f"./vendor/{name}": "data:text/javascript;base64,"
        + base64.b64encode((folder / "vendor" / name).read_bytes()).decode()
        for name in vendored
    }
    parts = {
        "/*style.css*/": (folder / "style.css").read_text(),
        "/*imports*/": json.dumps({"imports": imports}),
        "/*xray.js*/": (folder / "xray.js").read_text(),
    }
    page = (folder / "trace.html").read_text()
    for mark, text in parts.items():
        page = page.replace(mark, text)
    return page
