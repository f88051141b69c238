"""`Recorder`: the event log of one engine as JSON lines, the format of traces and of the live view.

The first line is a header with the model, the engine's settings and the state at that moment; each further line is one
event. A line of kind "step" says what each request computed, how many tokens it got, and how its block tables changed,
so that a reader can replay the whole state. While no recorder is attached the engine keeps none of this.
Next to read: `../events.py`, then `../insight/trace.py`, which reads the lines.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from quire import __version__
from quire.events import EventKind, OpTime
from quire.scheduler.request import Request
from quire.types import SchedulerOutput, StepResult

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

FORMAT_VERSION = 1
MAX_STEPS = 1024
"""Steps kept for `take`; of older ones only the totals are written."""
MODEL_FIELDS = (
    "num_layers", "num_heads", "num_kv_heads", "head_size", "hidden_size", "vocab_size", "num_parameters",
)  # fmt: skip
SETTINGS = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "policy")
KEPT_NAMES = 1024
"""Newest requests whose names are kept after their end: a step in flight may still compute one."""


class _ShownId:
    """Id of a request in a line: other clients than its own read a name that says nothing of it."""

    __slots__ = ("client_id", "name", "request_id")

    def __init__(self, request_id: str, name: str, client_id: str | None) -> None:
        self.request_id, self.name, self.client_id = request_id, name, client_id

    def shown_to(self, reader: str | None) -> str:
        """Return the id, or the name if another client reads it."""
        return self.request_id if reader in (None, self.client_id) else self.name


class Recorder:
    """Watches one engine from its construction to `close`. All calls come from the thread that runs the engine.

    `op_period`: every `op_period`-th step times each of its instructions (0: none). `op_interval_s`: a step does so if
    none did for so long (0: by `op_period` alone), which bounds the cost whatever a step takes. `with_text`: lines hold
    the ids and texts of tokens; else a `None` stands for each new one, and only numbers leave the engine. `reader`: the
    client that reads the lines; None: the owner of the engine, which sees the ids of all requests.
    """

    def __init__(
        self,
        engine: "LLMEngine",
        *,
        op_period: int = 0,
        op_interval_s: float = 0.0,
        with_text: bool = False,
        reader: str | None = None,
    ) -> None:
        self._engine = engine
        self._with_text = with_text
        self._steps: deque[tuple[SchedulerOutput, StepResult]] = deque(maxlen=MAX_STEPS)
        self._shown: dict[str, _ShownId] = {}
        self._numbers = itertools.count(1)
        self._headers: dict[str | None, bytes] = {}
        """Of each reader: the header; empty once it was taken."""
        self.begin(reader, op_period=op_period, op_interval_s=op_interval_s)

    @property
    def has_readers(self) -> bool:
        """True if a client reads the lines."""
        return bool(self._headers)

    def begin(self, reader: str | None, *, op_period: int = 0, op_interval_s: float = 0.0) -> None:
        """Give a reader a header and what comes after it. Lines for earlier readers must have been taken."""
        self._num_seen = self._engine.events.num_recorded
        for request in self._engine.scheduler.requests.by_id.values():
            if request.request_id not in self._shown:
                self.meet(request)
        self._headers[reader] = _encoded([self._describe(reader)], reader)
        self._op_interval_s, self._timed_s = op_interval_s, -math.inf
        self._engine.watch(self._note, op_period or int(op_interval_s > 0))

    def end(self, reader: str | None) -> None:
        """Write no more lines for a reader. Without readers the engine is not watched."""
        self._headers.pop(reader, None)
        if not self._headers:
            self._engine.watch(None)
            self._steps.clear()

    def close(self) -> None:
        """Stop watching."""
        for reader in tuple(self._headers):
            self.end(reader)

    def _note(self, output: SchedulerOutput, result: StepResult) -> None:
        self._steps.append((output, result))
        if self._op_interval_s:
            now_s = time.monotonic()
            self._timed_s = now_s if output.times_ops else self._timed_s
            self._engine.watch(self._note, int(now_s - self._timed_s >= self._op_interval_s))

    def take(self) -> bytes:
        """Return the lines since the last call, each with its line end; the first call begins with the header."""
        return self.take_each()[None]

    def take_each(self) -> dict[str | None, bytes]:
        """Return the lines of each reader, as `take` does."""
        lines = self._take_lines()
        taken = {reader: header + _encoded(lines, reader) for reader, header in self._headers.items()}
        self._headers = dict.fromkeys(taken, b"")
        return taken

    def _take_lines(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        steps = {output.step_id: (output, result) for output, result in self._steps}
        self._steps.clear()
        events = self._engine.events
        new = events.since(self._num_seen)
        lost = events.num_recorded - self._num_seen - len(new)
        self._num_seen = events.num_recorded
        if lost:
            lines.append({"t": time.monotonic(), "kind": "gap", "num_events": lost})
        ended: list[dict[str, Any]] = []
        is_computing = False
        for event in new:
            line = {"t": event.time_s, "kind": event.kind.value, "id": self._name(event.request_id), **event.data}
            if event.kind is EventKind.OPS and not self._with_text:
                line["ops"] = [_without_choice(op) for op in event.data["ops"]]
            is_computing = is_computing or event.kind is EventKind.SCHEDULE
            if event.kind is EventKind.FINISH and is_computing:
                ended.append(line)  # a request still holds its blocks in the step that ends it
                continue
            if event.kind is EventKind.STEP:
                is_computing = False
                if step := steps.get(event.data["step_id"]):
                    line |= self._describe_step(*step)
            lines.append(line)
            if event.kind is EventKind.STEP:
                lines += ended
                ended = []
        self._forget()
        return lines + ended

    # --- Names ----------------------------------------------------------------------------------

    def meet(self, request: Request) -> None:
        """Note the client of a request that was queued since `begin`. No client is shown the id of an unknown one."""
        for item in (request, *request.siblings):
            self._shown[item.request_id] = self._new_name(item.request_id, item.spec.client_id)

    def _new_name(self, request_id: str, client_id: str | None) -> _ShownId:
        return _ShownId(request_id, f"r{next(self._numbers)}", client_id)

    def _name(self, request_id: str) -> _ShownId | str:
        """Return what stands in a line for a request."""
        if request_id and request_id not in self._shown:
            self._shown[request_id] = self._new_name(request_id, None)
        return self._shown[request_id] if request_id else ""

    def _forget(self) -> None:
        """Drop names of requests that have ended, once they are many."""
        if len(self._shown) > 2 * KEPT_NAMES:
            unfinished = self._engine.scheduler.requests.by_id
            for request_id in tuple(self._shown)[:-KEPT_NAMES]:
                if request_id not in unfinished:
                    del self._shown[request_id]

    # --- Lines ----------------------------------------------------------------------------------

    def _describe_step(self, output: SchedulerOutput, result: StepResult) -> dict[str, Any]:
        token_ids = {item.request_id: item.token_ids for item in result.results}
        return {
            "requests": [
                {
                    "id": self._name(item.request_id),
                    "start": item.num_computed_tokens,
                    "count": item.num_tokens,
                    "drafts": len(item.draft_token_ids),
                    "new": self._ids(token_ids.get(item.request_id, ())),
                    "text": self._text(token_ids.get(item.request_id, ())),
                    "tables": [[change.start, change.block_ids] for change in item.block_table_updates],
                }
                for item in output.scheduled
            ],
            "new_requests": [
                {
                    "id": self._name(new.request_id),
                    "num_prompt_tokens": new.num_prompt_tokens,
                    "num_tokens": len(new.token_ids),
                    "text": self._text(new.token_ids),
                }
                for new in output.new_requests
            ],
        }

    def _ids(self, token_ids: tuple[int, ...]) -> Sequence[int | None]:
        """Return one entry per token: its id, or None if no text may leave the engine."""
        return token_ids if self._with_text else (None,) * len(token_ids)

    def _text(self, token_ids: tuple[int, ...]) -> list[str] | None:
        """Return one piece of text per token; None if no text may leave the engine, or it has no tokenizer."""
        if not self._with_text or self._engine.tokenizer is None:
            return None
        decode = self._engine.tokenizer.decode
        return [decode([token_id]) for token_id in token_ids]

    def _describe(self, reader: str | None) -> dict[str, Any]:
        """Return the header: format, model, settings, and the requests that are under way."""
        config, scheduler = self._engine.config, self._engine.scheduler
        model, settings, blocks = config.model, config.scheduler, scheduler.blocks
        return {
            "quire_trace": FORMAT_VERSION,
            "version": __version__,
            "t": time.monotonic(),
            "model": {"name": config.options.model, **{name: getattr(model, name) for name in MODEL_FIELDS}},
            "engine": {
                **{name: getattr(settings, name) for name in SETTINGS},
                "dtype": config.dtype,
                "kv_dtype": config.kv_dtype,
                "uses_plan": config.uses_plan,
                "tensor_parallel_size": config.options.tensor_parallel_size,
                "caches_prefixes": settings.enable_prefix_caching,
                "windows": [group.spec.window for group in settings.kv_cache_groups],
                "kv_bytes_per_token": config.options.tensor_parallel_size
                * sum(len(group.layer_indices) * group.spec.bytes_per_token for group in settings.kv_cache_groups),
            },
            "requests": [
                {
                    "id": self._shown[request.request_id],
                    "num_prompt_tokens": request.num_prompt_tokens,
                    "num_computed": request.num_computed_tokens,
                    "num_tokens": request.num_tokens,
                    "tables": request.blocks.tables,
                }
                for request in scheduler.requests.running
            ],
            "num_waiting": scheduler.num_waiting,
            "waiting": {
                self._shown[name].shown_to(reader): since_s
                for name, since_s in scheduler.requests.waiting_since_s().items()
            },
            "cached": blocks.cache.block_ids(),
            "held": blocks.tiers.held_ids(),
        }


def _encoded(lines: list[dict[str, Any]], reader: str | None) -> bytes:
    """Return lines as a reader may see them."""
    return msgspec.json.Encoder(enc_hook=partial(_ShownId.shown_to, reader=reader)).encode_lines(lines)


def _without_choice(op: OpTime) -> OpTime:
    """Return an instruction without which experts the tokens chose: of few tokens that would tell which they are."""
    return replace(op, expert_loads=tuple(sorted(op.expert_loads, reverse=True))) if op.expert_loads else op
