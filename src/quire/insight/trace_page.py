"""A trace as one HTML file that opens from disk, without a network: the live page's own drawing code and style inlined.

Next to read: `../page/xray.js`, which draws; `../page/trace.html`, the frame.
"""

import base64
import functools
import json
import re
from importlib.resources import files

from quire.insight.trace import EngineTrace

MODULES = (
    "blocks.js",
    "drawing.js",
    "mask.js",
    "recording.js",
    "screen.js",
    "story.js",
    "timeline.js",
    "ways.js",
    "work.js",
    "xray.js",
)
"""All but the chat and the page of a server."""
TRACE_MARK = "/*trace*/"
"""Place of the lines in `template`. The page, which saves traces too, replaces it in the same way."""


def to_html(trace: EngineTrace) -> str:
    """Return the whole page. It does not draw the slices of `torch.profiler`, which would be most of the file."""
    lines = "\n".join(json.dumps(line) for line in trace.lines if line.get("kind") != "torch")
    # Within JSON "<" stands only in strings: escaped, no text can end the script element.
    return template().replace(TRACE_MARK, lines.replace("<", "\\u003c"))


@functools.cache
def template() -> str:
    """Return the page without its trace. Modules name each other in an import map, whose entries hold them whole."""
    folder = files("quire") / "page"
    sources = {f"vendor/{name}": (folder / "vendor" / name).read_text() for name in ("preact.js", "htm.js")}
    sources |= {name: (folder / name).read_text() for name in MODULES}
    imports = {f"quire/{name}": _data_url(_with_bare_names(source)) for name, source in sources.items()}
    parts = {
        "/*style.css*/": (folder / "style.css").read_text(),
        "/*imports*/": json.dumps({"imports": imports}),
    }
    page = (folder / "trace.html").read_text()
    for mark, text in parts.items():
        page = page.replace(mark, text)
    return page


def _with_bare_names(source: str) -> str:
    """Return a module that imports "quire/x.js" in place of "./x.js", which has no meaning within a data URL."""
    return re.sub(r'(\bfrom ")\./', r"\1quire/", source)


def _data_url(source: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()
