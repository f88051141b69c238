"""`Recorder`: the event log of one engine as JSON lines, the format of traces and of the live view.

The first line is a header with the model, the engine's settings and the state at that moment; each further line is one
event. A line of kind "step" says what each request computed, which tokens it got, and how its block tables changed, so
that a reader can replay the whole state. While no recorder is attached the engine keeps none of this.
Next to read: `../events.py`, then `../insight/trace.py`, which reads the lines.
"""

import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from quire import __version__
from quire.events import EventKind
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
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Recorder:
    """Watches one engine from its construction to `close`. All calls come from the thread that runs the engine.

    `op_period`: every `op_period`-th step times each of its instructions (0: none). `op_interval_s`: a step does so if
    none did for so long (0: by `op_period` alone), which bounds the cost whatever a step takes. `with_text`: steps hold
    the text of the new tokens, and the header that of the prompts; else only numbers leave the engine.
    """

    def __init__(
        self, engine: "LLMEngine", *, op_period: int = 0, op_interval_s: float = 0.0, with_text: bool = False
    ) -> None:
        self._engine = engine
        self._op_interval_s, self._timed_s = op_interval_s, -math.inf
        self._with_text = with_text and engine.tokenizer is not None
        self._steps: deque[tuple[SchedulerOutput, StepResult]] = deque(maxlen=MAX_STEPS)
        self._num_seen = engine.events.num_recorded
        self._header: dict[str, Any] | None = self._describe()
        engine.watch(self._note, op_period or int(op_interval_s > 0))

    def _note(self, output: SchedulerOutput, result: StepResult) -> None:
        self._steps.append((output, result))
        if self._op_interval_s:
            now_s = time.monotonic()
            self._timed_s = now_s if output.times_ops else self._timed_s
            self._engine.watch(self._note, int(now_s - self._timed_s >= self._op_interval_s))

    def close(self) -> None:
        """Stop watching."""
        self._engine.watch(None)

    def take(self) -> bytes:
        """Return the lines since the last call, each with its line end; the first call begins with the header."""
        lines = [] if self._header is None else [self._header]
        self._header = None
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
            line: dict[str, Any] = {"t": event.time_s, "kind": event.kind.value, "id": event.request_id, **event.data}
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
        lines += ended
        return b"".join(_encode(line) + b"\n" for line in lines)

    def _describe_step(self, output: SchedulerOutput, result: StepResult) -> dict[str, Any]:
        token_ids = {item.request_id: item.token_ids for item in result.results}
        return {
            "requests": [
                {
                    "id": item.request_id,
                    "start": item.num_computed_tokens,
                    "count": item.num_tokens,
                    "drafts": len(item.draft_token_ids),
                    "new": token_ids.get(item.request_id, ()),
                    "text": self._text(token_ids.get(item.request_id, ())),
                    "tables": [[change.start, change.block_ids] for change in item.block_table_updates],
                }
                for item in output.scheduled
            ],
            "new_requests": [
                {
                    "id": new.request_id,
                    "num_prompt_tokens": new.num_prompt_tokens,
                    "num_tokens": len(new.token_ids),
                    "text": self._text(new.token_ids),
                }
                for new in output.new_requests
            ],
            "preempted": output.preempted_ids,
            "finished": output.finished_ids,
            "transfers": output.transfers,
        }

    def _text(self, token_ids: tuple[int, ...]) -> list[str] | None:
        """Return one piece of text per token; None if no text may leave the engine."""
        if not self._with_text:
            return None
        decode = self._engine.get_tokenizer().decode
        return [decode([token_id]) for token_id in token_ids]

    def _describe(self) -> dict[str, Any]:
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
                    "id": request.request_id,
                    "num_prompt_tokens": request.num_prompt_tokens,
                    "num_computed": request.num_computed_tokens,
                    "num_tokens": request.num_tokens,
                    "tables": request.blocks.tables,
                }
                for request in scheduler.requests.running
            ],
            "num_waiting": scheduler.num_waiting,
            "waiting": scheduler.requests.waiting_since_s(),
            "cached": blocks.cache.block_ids(),
            "held": blocks.tiers.held_ids(),
        }
