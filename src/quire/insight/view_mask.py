"""`view_mask`: the one attention mask of a step: the new tokens of all requests by the keys of all requests.

Requests are blocks on the diagonal. Keys of the KV cache, chunks of a prompt and keys of this step are told apart.
Must not measure or decide: all is read from a trace. Next to read: `picture.py`, `trace.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quire.insight.picture import COLOURS, Kind, Picture, Row, counted
from quire.insight.trace import EngineTrace, Line

MAX_COLUMNS, MAX_ROWS, MAX_REQUESTS = 96, 48, 24
KINDS = {
    "prefix": Kind("░", "#c7e9c0", "attended, from the KV cache: a prefix that an earlier request computed"),
    "old": Kind("▒", "#9ecae1", "attended, from the KV cache: computed in an earlier step"),
    "odd": Kind("▓", "#6baed6", "the same, every second chunk of the prompt"),
    "new": Kind("█", "#1f77b4", "attended, computed in this step"),
    "masked": Kind("·", "#eeeeee", "masked: later in the same request, or behind the window"),
    "other": Kind(" ", "#ffffff", "empty: keys of another request, which are not read"),
}


@dataclass(frozen=True, slots=True)
class _Block:
    """A request's part of the matrix.

    Fields:
        count: rows, from position `start` on, which is also the number of earlier keys.
        num_cached: of them found in the prefix cache; chunks: of the others the first position and the end of each
            chunk of the prompt, in order.
    """

    request_id: str
    letter: str
    start: int
    count: int
    num_cached: int
    chunks: Sequence[tuple[int, int]]

    @property
    def num_keys(self) -> int:
        return self.start + self.count

    def kind_of(self, key: int) -> str:
        """Return the kind of a key that is attended to."""
        if key >= self.start:
            return "new"
        if key < self.num_cached:
            return "prefix"
        return "odd" if any(first <= key < end for first, end in self.chunks[1::2]) else "old"


def view_mask(trace: EngineTrace, step: Line, letters: Mapping[str, str]) -> Picture:
    """Draw the mask of a step. `letters`: a name for each request."""
    windows = [window for window in trace.header["engine"]["windows"] if window]
    window = windows[0] if len(windows) == len(trace.header["engine"]["windows"]) else None
    some = f" Some layers mask positions behind a window of {windows[0]} too." if windows and not window else ""
    blocks = [_block(trace, step, share, letters[share["id"]]) for share in step["requests"]]
    shown = blocks[:MAX_REQUESTS]
    scale = -(-sum(block.num_keys for block in shown) // MAX_COLUMNS)
    every = -(-sum(block.count for block in shown) // MAX_ROWS)
    num_columns = [-(-block.num_keys // scale) for block in shown]
    owners = {
        f"keys {block.request_id}": Kind(block.letter, COLOURS[at % len(COLOURS)], f"keys of {block.request_id}")
        for at, block in enumerate(shown)
    }
    rows = [Row("keys of", [name for name, width in zip(owners, num_columns, strict=True) for _ in range(width)])]
    for at, block in enumerate(shown):
        before, behind = (["other"] * sum(part) for part in (num_columns[:at], num_columns[at + 1 :]))
        for position in range(block.start, block.num_keys, every):
            cells = [*before, *_cells(block, position, scale, window), *behind]
            rows.append(Row(f"{block.letter} token {position}", cells))
    num_rows, num_keys = sum(block.count for block in blocks), sum(block.num_keys for block in blocks)
    num_pairs = sum(_num_pairs(block.num_keys, window) - _num_pairs(block.start, window) for block in blocks)
    terms = ", ".join(f"{block.letter}: {block.count} at {block.start}" for block in blocks[:8])
    more = f" {len(blocks) - len(shown)} more requests are not drawn." if len(blocks) > len(shown) else ""
    return Picture(
        f"step {step['step_id']}: attention mask of {counted(num_rows, 'new token')} of"
        f" {counted(len(blocks), 'request')}",
        f"A row is {'a new token' if every == 1 else f'one in {every} new tokens'}, a column"
        f" {'a key' if scale == 1 else f'{scale} keys'}. The matrix is block-diagonal: of {num_rows} ·"
        f" {num_keys} = {num_rows * num_keys} cells kernels compute {num_pairs}.{some}{more}",
        f"pairs = Σ over new tokens of {'min(window, position + 1)' if window else '(position + 1)'} = {num_pairs}"
        f"  ({terms}{', …' if len(blocks) > 8 else ''})",
        "src/quire/kernels/paged_attention.py",
        KINDS | owners,
        rows,
    )


def _num_pairs(num_tokens: int, window: int | None) -> int:
    """Return the keys that the first tokens of a request attend to, each itself and those before it in its window."""
    whole = min(num_tokens, window or num_tokens)
    return whole * (whole + 1) // 2 + (num_tokens - whole) * whole


def _block(trace: EngineTrace, step: Line, share: Line, letter: str) -> _Block:
    """Return a request's block, with what the trace tells of its earlier keys."""
    num_cached, chunks = 0, list[tuple[int, int]]()
    for line in trace.lines:
        if line is step:
            break
        if line.get("id") == share["id"] and line["kind"] == "admit":
            num_cached, chunks = line["num_cached_tokens"], []
        elif line.get("kind") == "step":
            own = (one for one in line.get("requests", ()) if one["id"] == share["id"])
            chunks += [
                (one["start"], one["start"] + one["count"])
                for one in own
                if one["count"] > 1 + one["drafts"] or not one["new"]
            ]
    return _Block(share["id"], letter, share["start"], share["count"], num_cached, chunks)


def _cells(block: _Block, position: int, scale: int, window: int | None) -> Iterator[str]:
    """Yield a row's cells of its own block; a cell of several keys shows the last one that is attended to."""
    first = max(0, position - window + 1) if window else 0
    for column in range(0, block.num_keys, scale):
        last = min(column + scale - 1, position)
        yield block.kind_of(last) if first <= last and column <= position else "masked"
