"""Traces: the event log as a file of JSON lines, the engine's state at any step, replayed from it; a trace as an HTML
file.

`engine/recorder.py` writes the lines. A header line restates the whole state, so a reader may begin at any header.
Next to read: `chrome.py`, which makes a timeline of a trace, and `view.py`, which draws one step.
"""

import base64
import copy
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.engine.recorder import FORMAT_VERSION
from quire.errors import QuireError
from quire.types import NULL_BLOCK_ID

Line = dict[str, Any]


class TraceError(QuireError):
    """A file is no trace, or one that this version cannot read."""

    code = "trace_invalid"
    http_status = 400
    exit_code = 3


@dataclass(slots=True)
class TracedRequest:
    """An unfinished request after a step.

    Fields:
        num_tokens: known tokens, the sampled ones included; num_computed: of them in the KV cache.
        tables: block ids per KV cache group.
    """

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class State:
    """The engine after a step.

    Fields:
        findable: blocks that hold a prefix, whether a request uses them or not.
        held: blocks that wait for a request to start, one entry per reference.
        waiting: when each request in the queue arrived or was preempted, in seconds of the trace's clock.
    """

    header: Line
    requests: dict[str, TracedRequest] = field(default_factory=dict)
    findable: set[int] = field(default_factory=set)
    waiting: dict[str, float] = field(default_factory=dict)
    held: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of_header(cls, header: Line) -> "State":
        """Return the state that a header line restates."""
        held: Counter[int] = Counter(header.get("held", ()))
        state = cls(header, findable=set(header["cached"]), waiting=dict(header.get("waiting", {})), held=held)
        for item in header["requests"]:
            known = TracedRequest(item["id"], item["num_prompt_tokens"], item["num_tokens"], item["num_computed"])
            known.tables = copy.deepcopy(item["tables"])
            state.requests[known.request_id] = known
        return state

    @property
    def references(self) -> Counter[int]:
        """Requests that hold each block in use, the waiting ones included."""
        tables = (table for request in self.requests.values() for table in request.tables)
        return self.held + Counter(block for table in tables for block in table if block != NULL_BLOCK_ID)

    @property
    def cached(self) -> set[int]:
        """Free blocks that hold a prefix."""
        return self.findable - self.references.keys()

    def apply(self, line: Line) -> None:
        """Take up the next line. Mutates: the state."""
        kind = line["kind"]
        if kind == "step":
            self._apply_step(line)
        elif kind in ("arrive", "admit", "preempt", "finish"):
            if kind in ("preempt", "finish"):
                self.requests.pop(line["id"], None)
            if kind in ("arrive", "preempt"):
                self.waiting[line["id"]] = line["t"]
            else:
                self.waiting.pop(line["id"], None)
        elif kind == "cache":
            self.findable.update(line["block_ids"])
        elif kind == "evict":
            self.findable.difference_update(line["block_ids"])
        elif kind == "fetch":
            self.held.update(line["block_ids"])
        elif kind == "release":
            self.held -= Counter(line["block_ids"])

    def _apply_step(self, line: Line) -> None:
        for new in line.get("new_requests", ()):
            tables: list[list[int]] = [[] for _ in self.header["engine"]["windows"]]
            self.requests[new["id"]] = TracedRequest(
                new["id"], new["num_prompt_tokens"], new["num_tokens"], tables=tables
            )
        for share in line.get("requests", ()):
            request = self.requests.get(share["id"])
            if request is None:  # it ended before the step's result came
                continue
            for table, (start, block_ids) in zip(request.tables, share["tables"], strict=True):
                table[start:] = block_ids
            num_new = len(share["new"])
            request.num_computed = share["start"] + share["count"] - share["drafts"] + max(0, num_new - 1)
            request.num_tokens = max(request.num_tokens, request.num_computed + (1 if num_new else 0))


@dataclass(slots=True)
class EngineTrace:
    """All lines of a trace. `is_cut`: its last line is incomplete and was left out."""

    lines: list[Line]
    is_cut: bool = False
    _ops: dict[int, list[Line]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str) -> "EngineTrace":
        """Read a file. Raises: TraceError if it cannot be read, is no trace, or comes from a newer version."""
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "the trace") -> "EngineTrace":
        """Parse the text of a file called `name`. Raises: TraceError."""
        rows = text.split("\n")
        trace = cls([], is_cut=bool(rows.pop()))
        for number, row in enumerate(rows, 1):
            try:
                line = json.loads(row)
                version = line.get("quire_trace", FORMAT_VERSION) if number > 1 else line["quire_trace"]
                if line.get("kind") == "ops":
                    trace._ops[line["step_id"]] = line["ops"]
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                if number == 1:
                    break
                raise TraceError(f"{name}, line {number}, is no event: the file is damaged, record it again") from error
            if not isinstance(version, int) or version > FORMAT_VERSION:
                raise TraceError(
                    f"{name} has trace format {version}, this version reads up to {FORMAT_VERSION}: upgrade Quire"
                )
            trace.lines.append(line)
        if not trace.lines:
            raise TraceError(f"{name} is no trace of Quire: record one with `quire trace PROMPT -o FILE.jsonl`")
        return trace

    @property
    def header(self) -> Line:
        """The first line."""
        return self.lines[0]

    @property
    def steps(self) -> list[Line]:
        """The lines of steps with their requests, oldest first."""
        return [line for line in self.lines if line.get("kind") == "step" and "requests" in line]

    def step(self, step_id: int | None = None) -> Line:
        """Return one step; None: the newest. Raises: TraceError naming the steps there are."""
        steps = self.steps
        if not steps:
            raise TraceError("the trace has no step: it was recorded while no request ran")
        found = [step for step in steps if step_id in (None, step["step_id"])]
        if not found:
            raise TraceError(f"no step {step_id}: the trace has {steps[0]['step_id']} … {steps[-1]['step_id']}")
        return found[-1]

    def state_after(self, step: Line) -> State:
        """Return the engine's state right after a step of `steps`; requests that it ended still hold their blocks."""
        return replay(self.lines[: next(at for at, line in enumerate(self.lines) if line is step) + 1])

    def ops_of(self, step: Line) -> list[Line]:
        """Return the timed instructions of a step; empty if they were not recorded."""
        return self._ops.get(step["step_id"], [])


def replay(lines: Iterable[Line]) -> State:
    """Return the state after all lines, the first of which is a header."""
    state: State | None = None
    for line in lines:
        if "quire_trace" in line:
            state = State.of_header(line)
        else:
            assert state is not None
            state.apply(line)
    assert state is not None
    return state


# --- One HTML file without a network: the live page's drawing code (`../page/xray.js`) and style ---

PAGE_MODULES = (
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
    return page_template().replace(TRACE_MARK, lines.replace("<", "\\u003c"))


@functools.cache
def page_template() -> str:
    """Return the page without its trace. Modules name each other in an import map, whose entries hold them whole."""
    from importlib.resources import files

    folder = files("quire") / "page"
    sources = {f"vendor/{name}": (folder / "vendor" / name).read_text() for name in ("preact.js", "htm.js")}
    sources |= {name: (folder / name).read_text() for name in PAGE_MODULES}
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
