"""Pictures of one recorded step: the attention mask of its batch, the KV blocks, its place in time, its instructions.

All are read from a trace: nothing is measured or decided here. In the mask, requests are blocks on the diagonal; keys
of the KV cache, chunks of a prompt and keys of this step are told apart. Next to read: `trace.py`, `picture.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quire.insight.picture import COLOURS, Kind, Picture, Row, counted
from quire.insight.trace import EngineTrace, Line
from quire.types import NULL_BLOCK_ID

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_STEPS = 64
MAX_BLOCKS = 1 << 16


# --- The attention mask ---------------------------------------------------------------------------

MAX_COLUMNS, MAX_ROWS, MAX_REQUESTS = 96, 48, 24
MASK_KINDS = {
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


def view_mask(trace: EngineTrace, step: Line) -> Picture:
    """Draw the one attention mask of a step: the new tokens of all requests by the keys of all requests."""
    letters = _names(trace)
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
        MASK_KINDS | owners,
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


def fullest_step(trace: EngineTrace) -> Line:
    """Return the first of the steps with most requests. Raises: TraceError for a trace without steps."""
    return max(trace.steps or [trace.step()], key=lambda step: len(step["requests"]))


# --- Blocks, time and instructions ----------------------------------------------------------------


def view_blocks(trace: EngineTrace, step: Line) -> Picture:
    """All KV blocks after the step, by owner; and each request's block table."""
    state, size = trace.state_after(step), trace.header["engine"]["block_size"]
    num_blocks = trace.header["engine"]["num_blocks"]
    references, names = state.references, _names(trace)
    owner = {block: name for name, item in state.requests.items() for table in item.tables for block in table}
    kinds = {
        name: Kind(names[name], COLOURS[at % len(COLOURS)], f"request {name}") for at, name in enumerate(state.requests)
    }
    kinds |= {
        "shared": Kind("#", "#333333", "shared by several requests"),
        "cached": Kind("c", "#c7c7c7", "free, holds a cached prefix"),
        "free": Kind("·", "#eeeeee", "free"),
        "null": Kind("0", "#ffffff", "block 0 belongs to no request"),
    }

    def kind_of(block: int) -> str:
        if block == NULL_BLOCK_ID:
            return "null"
        if references[block] > 1:
            return "shared"
        if references[block]:  # one that waits for a request, which is not drawn, looks as if it were free
            return owner.get(block, "cached")
        return "cached" if block in state.cached else "free"

    used = max([*references, *state.cached, 0]) + 1
    shown = min(num_blocks, -(-used // 64) * 64, MAX_BLOCKS)
    rows = [
        Row(f"blocks {start} …", [kind_of(block) for block in range(start, min(start + 64, shown))])
        for start in range(0, shown, 64)
    ]
    rest = "all free" if shown >= used else "not drawn"
    rows.append(Row(f"{num_blocks - shown} more", (), rest) if shown < num_blocks else Row(""))
    for name, item in state.requests.items():
        for group, table in enumerate(item.tables):
            entries = " ".join(f"{at}→{block}" for at, block in enumerate(table[:12]))
            last = item.num_computed - (len(table) - 1) * size
            remark = f"{entries}{' …' if len(table) > 12 else ''}   last block {max(0, last)}/{size}"
            rows.append(Row(f"table {names[name]}" + (f".{group}" if len(item.tables) > 1 else ""), (), remark))
    held = len(references)
    tokens = sum(item.num_computed for item in state.requests.values())
    num_entries = sum(len(table) for item in state.requests.values() for table in item.tables[:1])
    saved = sum(count - 1 for count in references.values())
    return Picture(
        f"step {step['step_id']}: KV blocks of {size} tokens",
        f"{held} blocks in use, {len(state.cached)} cached, {num_blocks - 1 - held - len(state.cached)} free;"
        f" sharing saves {saved}. A table maps a request's block to a block of the pool.",
        f"waste = table entries × {size} - tokens = {num_entries} × {size} - {tokens}: at most one partly"
        " filled block per request",
        "src/quire/scheduler/blocks.py",
        kinds,
        rows,
    )


def view_step(trace: EngineTrace, step: Line) -> Picture:
    """The steps up to this one, a column each: which requests waited, prefilled and decoded."""
    steps = trace.steps
    at = next(index for index, item in enumerate(steps) if item["step_id"] == step["step_id"])
    shown = steps[max(0, at - MAX_STEPS + 1) : at + 1]
    ids = list(dict.fromkeys(share["id"] for item in shown for share in item["requests"]))
    names = _names(trace)
    kinds = {
        "prefill": Kind("▓", "#d95f02", "prefill: several prompt tokens"),
        "decode": Kind("d", "#1f77b4", "decode: one token, or several iterations"),
        "drafts": Kind("s", "#9467bd", "decode with drafts"),
        "idle": Kind("·", "#eeeeee", "not in the step"),
    }
    rows = []
    for name in ids:
        shares = [next((share for share in item["requests"] if share["id"] == name), None) for item in shown]
        last, remark = shares[-1], ""
        if last is not None:
            tokens, num_new = counted(last["count"], "token"), len(last["new"])
            remark = f"{tokens} from position {last['start']}, {num_new} new{_drafts(last)}"
        rows.append(Row(f"{names[name]} {name}"[:24], [_share_kind(share) for share in shares], remark))
    for name, since_s in trace.state_after(step).waiting.items():
        rows.append(Row(f"{names[name]} {name}"[:24], (), f"waits for {1e3 * (step['t'] - since_s):.1f} ms"))
    phases = " + ".join(f"{phase} {step[f'{phase}_s'] * 1e3:.2f}" for phase in ("schedule", "execute", "output"))
    return Picture(
        f"step {step['step_id']}: {counted(step['num_tokens'], 'token')} of"
        f" {counted(step['num_requests'], 'request')} in {step['duration_s'] * 1e3:.2f} ms",
        f"The last {counted(len(shown), 'step')}, a column each, this one on the right. Requests join and leave at"
        " every step.",
        f"{step['duration_s'] * 1e3:.2f} ms = {phases};"
        f" {counted(step['num_iterations'], 'forward pass', 'forward passes')}",
        "src/quire/scheduler/step_plan.py",
        kinds,
        rows,
    )


def _drafts(share: dict[str, Any]) -> str:
    """Return how many of a request's drafts were right; nothing if it had none."""
    drafts = share["drafts"]
    return f", {min(drafts, max(0, len(share['new']) - 1))} of {counted(drafts, 'draft')} right" if drafts else ""


def _share_kind(share: dict[str, Any] | None) -> str:
    if share is None:
        return "idle"
    if share["drafts"]:
        return "drafts"
    return "decode" if share["count"] <= 1 and share["new"] else "prefill"


def view_ops(trace: EngineTrace, step: Line) -> Picture:
    """Time of each kind of instruction in the step, or in the newest timed step before it."""
    return _times(
        trace,
        step,
        lambda op: f"{op['name'].split(':')[0]} {op['arithmetic']}",
        "Instructions of one kind together",
        lambda row: -row[1][1],
    )


def view_layers(trace: EngineTrace, step: Line) -> Picture:
    """Time of each layer in the step, or in the newest timed step before it."""
    return _times(
        trace,
        step,
        lambda op: "outside" if (at := op.get("layer")) is None else f"layer {at}",
        "Instructions of one layer together; outside are the embedding, the last norm and the head",
        lambda row: (row[0] == "outside", 0),
    )


def _times(
    trace: EngineTrace,
    step: Line,
    group: Callable[[Line], str],
    meaning: str,
    order: Callable[[tuple[str, list[float]]], Any],
) -> Picture:
    """Draw the times of the groups of instructions, a row each. `order`: of a group's name and its totals."""
    steps = trace.steps[: trace.steps.index(step) + 1]
    timed = next((item for item in reversed(steps) if trace.ops_of(item)), None)
    kinds = {"time": Kind("█", "#1f77b4", "share of the time in instructions")}
    if timed is None:
        return Picture(
            f"step {step['step_id']}: no instruction was timed",
            "Record with --op-period 1; only plans have instructions.",
            "",
            "src/quire/runtime/plan/emit.py",
            kinds,
        )
    totals: dict[str, list[float]] = {}
    for op in trace.ops_of(timed):
        total = totals.setdefault(group(op), [0.0] * 4)
        for at, value in enumerate((1, op["microseconds"], op["flops"], op["num_bytes"])):
            total[at] += value
    all_us = sum(total[1] for total in totals.values())
    rows = []
    for name, (count, us, flops, num_bytes) in sorted(totals.items(), key=order):
        remark = f"{us:9.1f} µs  {count:4.0f}×  {flops / us / 1e3:8.2f} GFLOP/s  {num_bytes / us / 1e3:7.2f} GB/s"
        rows.append(Row(name, ["time"] * round(40 * us / all_us), remark))
    return Picture(
        f"step {timed['step_id']}: {all_us / 1e3:.2f} ms in {len(trace.ops_of(timed))} instructions",
        f"{meaning}, with {counted(timed['num_tokens'], 'token')} in the step.",
        f"{all_us / 1e3:.2f} ms of {timed['execute_s'] * 1e3:.2f} ms that the step takes; rates count weights and KV",
        "src/quire/kernels/instruction.py",
        kinds,
        rows,
    )


VIEWS: dict[str, Callable[[EngineTrace, Line], Picture]] = {
    "mask": view_mask,
    "blocks": view_blocks,
    "step": view_step,
    "ops": view_ops,
}


def _names(trace: EngineTrace) -> dict[str, str]:
    """A letter per request of the trace, in the order in which they come; the alphabet begins again after 26."""
    ids: dict[str, None] = {}
    for line in trace.lines:
        found = line.get("requests", ()) if "quire_trace" in line or line["kind"] == "step" else ()
        ids |= dict.fromkeys([*line.get("waiting", ()), *(item["id"] for item in found)])
        if line.get("kind") == "arrive":
            ids[line["id"]] = None
    return {name: LETTERS[at % len(LETTERS)] for at, name in enumerate(ids)}
