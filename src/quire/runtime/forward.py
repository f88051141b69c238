"""Two ways to compute a step's hidden states and logits: op by op in PyTorch, or by a native plan.

`ModelRunner` knows only the protocol `Forward`. Next to read: `model_runner.py`.
"""

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.events import OpTime
from quire.kernels.lora import ADAPTERS
from quire.kernels.registry import trace_logger, trace_setting
from quire.runtime.batch import RequestStates, StepLayout, build_batch
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.links import ONE_RANK, Channel, Links, TensorGroup
from quire.runtime.plan.emit import BODY, GREEDY, LOGITS, SHARES, PlannedModel

if TYPE_CHECKING:
    import torch

    from quire.runtime.adapter_pool import AdapterPool


class Forward(Protocol):
    """Computes one step after another; hidden states of a step stay until the next.

    Values are NumPy arrays on a CPU and tensors on other devices.
    Attributes: `times_ops`: time each instruction of the next calls; `gives_shares`: `shares` may be called.
    """

    times_ops: bool
    gives_shares: bool

    def run(self, layout: StepLayout, states: RequestStates, *, only_likeliest: bool) -> list[int | None] | None:
        """Compute hidden states and fill the KV cache.

        `only_likeliest`: the caller wants only the likeliest token of each of the layout's logit rows. They are
        returned (None for a row without a largest finite logit) if that is cheaper than logits; else the result is
        None, and the caller asks for `logits`.
        """

    def hidden(self, first: int, last: int) -> Any:
        """Hidden states of rows first … last - 1. Shapes: [last - first, E]."""

    def take_op_times(self) -> tuple[OpTime, ...]:
        """Return time and work of each instruction since the last call, if they are traced."""

    def logits(self, rows: NDArray[np.int32]) -> Any:
        """Logits of rows of the step, which the caller may overwrite. Shapes: [S] -> [S, V]. Dtypes: fp32."""

    def shares(self, rows: NDArray[np.int32]) -> Any:
        """`logits` of the rank's share of the vocabulary alone. Shapes: [S] -> [S, columns of a rank]."""


class EagerForward:
    """The model itself, on any device. It is the only user of torch here."""

    gives_shares = False

    def __init__(
        self,
        model: Any,
        cache: CacheEngine,
        block_size: int,
        device: "torch.device",
        group: TensorGroup | None = None,
    ) -> None:
        """`group`: the ranks that share the model's layers."""
        self.model = model
        self._cache = cache
        self._block_size = block_size
        self._device, self._group = device, group
        self._hidden: Any = None
        self.times_ops = False  # only a plan has instructions

    def run(self, layout: StepLayout, states: RequestStates, *, only_likeliest: bool) -> list[int | None] | None:
        import torch

        with torch.inference_mode():
            batch = build_batch(layout, states, self._cache, self._block_size, self._device)
            self._hidden = self.model(batch.token_ids, batch)
            if self._group is None or not only_likeliest or not len(layout.logit_rows):
                return None
            return self._group.likeliest(lambda: self._score(layout.logit_rows))

    def hidden(self, first: int, last: int) -> Any:
        return self._given(self._hidden[first:last].float())

    def take_op_times(self) -> tuple[OpTime, ...]:
        return ()

    def logits(self, rows: NDArray[np.int32]) -> Any:
        import torch

        with torch.inference_mode():
            return self._given(self._score(rows).float())

    def shares(self, rows: NDArray[np.int32]) -> Any:
        raise NotImplementedError

    def _score(self, rows: NDArray[np.int32]) -> "torch.Tensor":
        import torch

        index = torch.from_numpy(rows.astype(np.int64)).to(self._device)
        logits: torch.Tensor = self.model.compute_logits(self._hidden.index_select(0, index))
        return logits

    def _given(self, values: "torch.Tensor") -> Any:
        return values.numpy() if self._device.type == "cpu" else values


class PlannedForward:
    """A plan on the CPU."""

    def __init__(self, planned: PlannedModel, links: Links = ONE_RANK, adapters: "AdapterPool | None" = None) -> None:
        """`links`: to other stages, whose values are received before the layers run and sent after."""
        self._adapters = adapters
        self.planned, self._links = planned, links
        self._gives_likeliest, self.gives_shares = planned.gives_likeliest, planned.shares is not None
        self._none: NDArray[np.int32] = np.zeros(0, np.int32)
        self._tables: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        setting = trace_setting()
        self.times_ops = False
        self._is_traced, self._is_logged = setting in ("1", "events"), setting == "1"
        self._op_times: list[OpTime] = []

    def run(self, layout: StepLayout, states: RequestStates, *, only_likeliest: bool) -> list[int | None] | None:
        fused = (
            only_likeliest
            and self._gives_likeliest
            and 0 < len(layout.logit_rows) <= self.planned.limits.max_logit_rows
        )
        self._tables = (states.tokens, states.block_tables)
        parts, logit_rows = (BODY | GREEDY, layout.logit_rows) if fused else (BODY, self._none)
        if self._adapters is not None and self._adapters.lay_out(layout):
            parts |= ADAPTERS
        self._pass_values(layout, self._links.before, self.planned.inputs)
        self._run(parts, layout.rows, layout.starts, layout.counts, logit_rows)
        self._pass_values(layout, self._links.after, self.planned.outputs)
        if not fused:
            return None
        ids = self.planned.best_ids[: len(layout.logit_rows)].tolist()
        return [token_id if token_id >= 0 else None for token_id in ids] if min(ids) < 0 else ids

    def hidden(self, first: int, last: int) -> NDArray[np.float32]:
        return self.planned.hidden[first:last]

    def logits(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._of_head(LOGITS, self.planned.logits, rows)

    def shares(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        assert self.planned.shares is not None
        return self._of_head(SHARES, self.planned.shares, rows)

    def _of_head(self, part: int, result: NDArray[np.float32], rows: NDArray[np.int32]) -> NDArray[np.float32]:
        limit, found = self.planned.limits.max_logit_rows, []
        for start in range(0, max(len(rows), 1), limit):
            some = np.ascontiguousarray(rows[start : start + limit])
            self._run(part, self._none, self._none, self._none, some)
            found.append(result[: len(some)])
            # Each part overwrites the last one's memory, so more rows than the limit cost a copy.
            if len(rows) > limit:
                found[-1] = found[-1].copy()
        return found[0] if len(found) == 1 else np.concatenate(found)

    def take_op_times(self) -> tuple[OpTime, ...]:
        taken, self._op_times = tuple(self._op_times), []
        return taken

    def _pass_values(self, layout: StepLayout, channel: Channel | None, values: list[NDArray[np.float32]]) -> None:
        if channel is None:
            return
        pass_rows = channel.receive if channel is self._links.before else channel.send
        for rows in values:
            pass_rows(rows[: int(layout.counts.sum())])

    def _run(self, parts: int, *step: NDArray[np.int32]) -> None:
        """`step`: rows, starts, counts and logit rows."""
        assert self._tables is not None
        arrays = (*step, *self._tables)
        if not (self._is_traced or self.times_ops):
            self.planned.run(parts, *arrays)
            return
        times = self.planned.run_timed(parts, *arrays)
        self._op_times += times
        if self._is_logged:
            for op in times:
                trace_logger().info(
                    "%s: %.1f us, %.1f Mop %s, %.1f kB",
                    op.name,
                    op.microseconds,
                    op.flops / 1e6,
                    op.arithmetic,
                    op.num_bytes / 1e3,
                )
