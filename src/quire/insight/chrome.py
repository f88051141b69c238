"""A trace as a timeline in Chrome's trace-event JSON, which Perfetto and chrome://tracing open.

Process 1 is the engine: steps with their phases, and the timed instructions inside. Process 2 has a track per request:
what the server does before (receive, validate, tokenise), waiting, a slice per step, linked from the step by a flow,
with its detokenising inside, then what the server does after (send). Counters: tokens per step, requests, KV blocks,
and of timed steps the share of the machine's limit, where the trace has the limits.
Process 3 has the slices of `torch.profiler`, if the trace was recorded with it.
Format: "Trace Event Format" (Chromium). Next to read: `trace.py`.
"""

from collections.abc import Iterator
from typing import Any

from quire.insight.trace import EngineTrace, State

ENGINE, REQUESTS, TORCH = 1, 2, 3
STEPS, OPS = 1, 2
Slice = dict[str, Any]


def to_chrome(trace: EngineTrace) -> dict[str, Any]:
    """Return the whole file as one JSON object. Units: microseconds from the trace's beginning."""
    return {
        "traceEvents": [*_names(), *_Timeline(trace).events()],
        "displayTimeUnit": "ms",
        "otherData": {"model": trace.header["model"]["name"], "quire": trace.header["version"]},
    }


def _names() -> Iterator[Slice]:
    for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield _name("process_name", pid, 0, name)
    for tid, name in ((STEPS, "steps"), (OPS, "instructions")):
        yield _name("thread_name", ENGINE, tid, name)


class _Timeline:
    """Visits the lines of a trace in order."""

    def __init__(self, trace: EngineTrace) -> None:
        self._trace = trace
        self._start_s = trace.header["t"]
        self._tracks: dict[str, int] = {}
        self._waiting: dict[str, float] = {}
        """When each request without a step since then arrived or was preempted, in seconds of the trace's clock."""
        self._spans: dict[str, tuple[float, float]] = {}
        """Begin and end of each request's slices of the engine."""
        self._limits: Slice | None = None

    def events(self) -> Iterator[Slice]:
        state = State.of_header(self._trace.header)
        self._waiting = dict(state.waiting)
        for line in self._trace.lines[1:]:
            if "quire_trace" in line:
                state = State.of_header(line)
                self._waiting = dict(state.waiting)
                continue
            state.apply(line)
            if line["kind"] in ("arrive", "preempt"):
                self._waiting[line["id"]] = line["t"]
            elif line["kind"] == "admit" and line["id"] not in self._spans:
                # The engine takes requests between steps: they may have come before.
                self._waiting[line["id"]] = line["arrival_s"]
            if line["kind"] == "step" and "requests" in line:
                yield from self._step(line)
                yield from self._counters(line, state)
            elif line["kind"] == "torch":
                yield from self._torch(line)
            elif line["kind"] == "served":
                yield from self._served(line)
            elif line["kind"] == "limits":
                self._limits = line
            elif line["kind"] in ("admit", "preempt", "finish"):
                args = {name: value for name, value in line.items() if name not in ("t", "kind", "id")}
                yield from self._track(line["id"])
                if line["kind"] == "finish":  # it was aborted in the queue
                    yield from self._end_of_waiting(line["id"], self._us(line["t"]))
                yield {
                    "ph": "i",
                    "s": "t",
                    "name": line["kind"],
                    "ts": self._us(line["t"]),
                    "pid": REQUESTS,
                    "tid": self._tracks[line["id"]],
                    "args": args,
                }

    def _step(self, line: Slice) -> Iterator[Slice]:
        end_us = self._us(line["t"])
        start_us = end_us - line["duration_s"] * 1e6
        args = {
            "tokens": line["num_tokens"],
            "requests": line["num_requests"],
            "iterations": line["num_iterations"],
            "drafts": line.get("num_drafts", 0),
            "accepted": line.get("num_accepted", 0),
        }
        step_id = line["step_id"]
        yield _slice(f"step {step_id}", start_us, end_us - start_us, ENGINE, STEPS, args)
        at = start_us
        for phase in ("schedule", "execute", "output"):
            duration_us = min(line[f"{phase}_s"] * 1e6, end_us - at)
            yield _slice(phase, at, duration_us, ENGINE, STEPS, {})
            if phase == "execute":
                yield from self._ops(line, at, duration_us)
            at += duration_us
        for share in line["requests"]:
            yield from self._track(share["id"])
            tid = self._tracks[share["id"]]
            yield from self._end_of_waiting(share["id"], start_us)
            num_new = len(share["new"])
            name = "decode" if share["count"] - share["drafts"] == 1 and num_new else "prefill"
            told = {"step": step_id, "position": share["start"], "tokens": share["count"], "new": num_new}
            yield self._of_engine(name, start_us, end_us, share["id"], told)
            if num_new:
                output_us = min(line["output_s"] * 1e6, end_us - start_us)
                yield _slice("detokenise", end_us - output_us, output_us, REQUESTS, tid, {})
            flow = {"name": "computes", "cat": "flow", "id": f"{step_id}/{tid}"}
            yield {"ph": "s", "ts": start_us, "pid": ENGINE, "tid": STEPS, **flow}
            yield {"ph": "f", "bp": "e", "ts": start_us, "pid": REQUESTS, "tid": tid, **flow}

    def _end_of_waiting(self, request_id: str, end_us: float) -> Iterator[Slice]:
        """Yield the slice of a request's time in the queue, if it was there. It may have begun before the trace."""
        if request_id in self._waiting:
            start_us = max(0.0, self._us(self._waiting.pop(request_id)))
            if start_us < end_us:
                yield self._of_engine("waiting", start_us, end_us, request_id, {})

    def _of_engine(self, name: str, start_us: float, end_us: float, request_id: str, args: Slice) -> Slice:
        first_us, _ = self._spans.get(request_id, (start_us, 0.0))
        self._spans[request_id] = (first_us, end_us)
        return _slice(name, start_us, end_us - start_us, REQUESTS, self._tracks[request_id], args)

    def _served(self, line: Slice) -> Iterator[Slice]:
        """Yield what the server did before and after the engine; `phases`: name, start and end of each."""
        yield from self._track(line["id"])
        first_us, last_us = self._spans.get(line["id"], (float("inf"), 0.0))
        for name, start_s, end_s in line["phases"]:
            start_us, end_us = max(0.0, self._us(start_s)), self._us(end_s)
            if start_us < first_us:
                end_us = min(end_us, first_us)
            else:
                start_us = max(start_us, last_us)
            if start_us < end_us:
                yield _slice(name, start_us, end_us - start_us, REQUESTS, self._tracks[line["id"]], {})

    def _share_of_limit(self, line: Slice) -> float | None:
        """Return the least time of a timed step at the machine's limits as a percentage of its own; None if unknown."""
        ops = self._trace.ops_of(line)
        if not ops or self._limits is None:
            return None
        rates = self._limits["flops_per_s"]
        memory_s = sum(op["num_bytes"] for op in ops) / self._limits["read_bytes_per_s"]
        compute_s = sum(op["flops"] / rates.get(op["arithmetic"], rates["fp32"]) for op in ops)
        least_s = max(memory_s, compute_s) * line.get("num_iterations", 1)  # the first pass is timed
        return float(100 * least_s / max(line["duration_s"], 1e-9))

    def _ops(self, line: Slice, start_us: float, limit_us: float) -> Iterator[Slice]:
        at = start_us
        for op in self._trace.ops_of(line):
            duration_us = min(op["microseconds"], start_us + limit_us - at)
            args = {"flops": op["flops"], "bytes": op["num_bytes"], "arithmetic": op["arithmetic"]}
            yield _slice(op["name"], at, duration_us, ENGINE, OPS, args)
            at += duration_us

    def _torch(self, line: Slice) -> Iterator[Slice]:
        yield _name("process_name", TORCH, 0, "torch.profiler")
        tracks = {name: tid for tid, name in enumerate(dict.fromkeys(item[0] for item in line["slices"]), 1)}
        for name, tid in tracks.items():
            yield _name("thread_name", TORCH, tid, name)
        for track, name, start_s, duration_s in line["slices"]:
            yield _slice(name, self._us(start_s), 1e6 * duration_s, TORCH, tracks[track], {})

    def _counters(self, line: Slice, state: State) -> Iterator[Slice]:
        values: dict[str, Slice] = {
            "tokens per step": {"tokens": line["num_tokens"]},
            "requests": {"running": len(state.requests)},
            "KV blocks": {"in use": len(state.references), "cached": len(state.cached)},
        }
        if (share := self._share_of_limit(line)) is not None:
            values["share of the limit"] = {"%": share}
        for name, args in values.items():
            yield {"ph": "C", "name": name, "ts": self._us(line["t"]), "pid": ENGINE, "tid": 0, "args": args}

    def _track(self, request_id: str) -> Iterator[Slice]:
        if request_id not in self._tracks:
            self._tracks[request_id] = len(self._tracks) + 1
            yield _name("thread_name", REQUESTS, self._tracks[request_id], f"request {request_id}")

    def _us(self, time_s: float) -> float:
        return 1e6 * (time_s - float(self._start_s))


def _name(what: str, pid: int, tid: int, name: str) -> Slice:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, start_us: float, duration_us: float, pid: int, tid: int, args: Slice) -> Slice:
    return {"ph": "X", "name": name, "ts": start_us, "dur": max(0.0, duration_us), "pid": pid, "tid": tid, "args": args}
