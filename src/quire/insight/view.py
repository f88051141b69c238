"""Pictures of one recorded step: the attention mask of its batch, the KV blocks, its place in time, its instructions.

All are read from a trace: nothing is measured or decided here. Next to read: `trace.py`, `picture.py`.
"""

from collections.abc import Callable
from typing import Any

from quire.insight.picture import Kind, Picture, Row, counted
from quire.insight.trace import Line, Trace
from quire.types import NULL_BLOCK_ID

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")
MAX_COLUMNS, MAX_ROWS, MAX_STEPS = 96, 48, 64


def view_mask(trace: Trace, step: Line) -> Picture:
    """Which positions each new token of the step attends to. Requests are blocks on the diagonal: none sees another."""
    windows = [window for window in trace.header["engine"]["windows"] if window]
    window = windows[0] if len(windows) == len(trace.header["engine"]["windows"]) else None
    others = f" Some layers mask positions behind a window of {windows[0]} too." if windows and not window else ""
    shares = step["requests"]
    longest = max(share["start"] + share["count"] for share in shares)
    scale = -(-longest // MAX_COLUMNS)
    tokens = [
        (share, position) for share in shares for position in range(share["start"], share["start"] + share["count"])
    ]
    every = -(-len(tokens) // MAX_ROWS)
    names = _names(trace)
    rows, num_pairs = [], 0
    for _, position in tokens:
        num_pairs += min(position + 1, window or position + 1)
    for share, position in tokens[::every]:
        first = max(0, position - window + 1) if window else 0
        length = share["start"] + share["count"]
        cells = [
            _mask_cell(column * scale, scale, first, position, share["start"]) for column in range(-(-length // scale))
        ]
        rows.append(Row(f"{names[share['id']]} token {position}", cells))
    kinds = {
        "old": Kind("▒", "#9ecae1", "attended, computed in an earlier step (read from the KV cache)"),
        "new": Kind("█", "#1f77b4", "attended, computed in this step"),
        "masked": Kind("·", "#eeeeee", "masked: later in the same request, or behind the window"),
    }
    terms = ", ".join(f"{names[share['id']]}: {share['count']} at {share['start']}" for share in shares[:8])
    return Picture(
        f"step {step['step_id']}: attention mask of {counted(len(tokens), 'new token')} of"
        f" {counted(len(shares), 'request')}",
        f"A row is {'a new token' if every == 1 else f'one in {every} new tokens'}, a column"
        f" {'a position' if scale == 1 else f'{scale} positions'} of its own request. The batch is flat: tokens of"
        f" other requests are no columns.{others}",
        f"pairs = Σ over new tokens of {'min(window, position + 1)' if window else '(position + 1)'} = {num_pairs}"
        f"  ({terms}{', …' if len(shares) > 8 else ''})",
        "src/quire/kernels/paged_attention.py",
        kinds,
        rows,
    )


def _mask_cell(column: int, scale: int, first: int, position: int, start: int) -> str:
    last = column + scale - 1
    if column > position or last < first:
        return "masked"
    return "new" if min(last, position) >= start else "old"


def view_blocks(trace: Trace, step: Line) -> Picture:
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
    shown = min(num_blocks, -(-used // 64) * 64)
    rows = [
        Row(f"blocks {start} …", [kind_of(block) for block in range(start, min(start + 64, shown))])
        for start in range(0, shown, 64)
    ]
    rows.append(Row(f"{num_blocks - shown} more", (), "all free") if shown < num_blocks else Row(""))
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


def view_step(trace: Trace, step: Line) -> Picture:
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
        last = shares[-1]
        remark = "" if last is None else (
            f"{counted(last['count'], 'token')} from position {last['start']}, {len(last['new'])} new{_drafts(last)}"
        )  # fmt: skip
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


def view_ops(trace: Trace, step: Line) -> Picture:
    """Time of each kind of instruction in the step, or in the newest timed step before it."""
    steps = trace.steps[: trace.steps.index(step) + 1]
    timed = next((item for item in reversed(steps) if trace.ops_of(item)), None)
    kinds = {"time": Kind("█", "#1f77b4", "share of the time in instructions")}
    if timed is None:
        return Picture(
            f"step {step['step_id']}: no instruction was timed",
            "Record with --op-period 1; only plans have instructions.", "", "src/quire/runtime/plan/emit.py", kinds,
        )  # fmt: skip
    totals: dict[str, list[float]] = {}
    for op in trace.ops_of(timed):
        total = totals.setdefault(f"{op['name'].split(':')[0]} {op['arithmetic']}", [0.0] * 4)
        for at, value in enumerate((1, op["microseconds"], op["flops"], op["num_bytes"])):
            total[at] += value
    all_us = sum(total[1] for total in totals.values())
    rows = []
    for name, (count, us, flops, num_bytes) in sorted(totals.items(), key=lambda item: -item[1][1]):
        remark = f"{us:9.1f} µs  {count:4.0f}×  {flops / us / 1e3:8.2f} GFLOP/s  {num_bytes / us / 1e3:7.2f} GB/s"
        rows.append(Row(name, ["time"] * round(40 * us / all_us), remark))
    return Picture(
        f"step {timed['step_id']}: {all_us / 1e3:.2f} ms in {len(trace.ops_of(timed))} instructions",
        f"Instructions of one kind together, with {counted(timed['num_tokens'], 'token')} in the step.",
        f"{all_us / 1e3:.2f} ms of {timed['execute_s'] * 1e3:.2f} ms that the step takes; rates count weights and KV",
        "src/quire/kernels/instruction.py",
        kinds,
        rows,
    )


VIEWS: dict[str, Callable[[Trace, Line], Picture]] = {
    "mask": view_mask,
    "blocks": view_blocks,
    "step": view_step,
    "ops": view_ops,
}


def _names(trace: Trace) -> dict[str, str]:
    """A letter per request of the trace, in the order in which they come; the alphabet begins again after 26."""
    ids: dict[str, None] = {}
    for line in trace.lines:
        found = line.get("requests", ()) if "quire_trace" in line or line["kind"] == "step" else ()
        ids |= dict.fromkeys([*line.get("waiting", ()), *(item["id"] for item in found)])
        if line.get("kind") == "arrive":
            ids[line["id"]] = None
    return {name: LETTERS[at % len(LETTERS)] for at, name in enumerate(ids)}
