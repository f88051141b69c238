"""`DevicePlan`: a traced program as a list of calls on static memory, which a graph captures per size of step.

A second `Emitter` (`kernels/instruction.py`) is all it takes: `push` looks the op up in the table of `ops.py`. Models,
layers, instructions and lowering are those of the CPU's plans.
Next to read: `load.py`, which makes it, and `forward.py`, which runs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire._native import RowType
from quire.kernels.instruction import Buffer, Columns, Instruction, Packing
from quire.kernels.tracing import NotTraceableError
from quire.nn import parameter_types
from quire.runtime.device.memory import StepMemory
from quire.runtime.device.ops import OPS, KvView
from quire.runtime.plan.emit import BufferPlaces, place_buffers
from quire.runtime.plan.lower import Program


class DevicePacking(Packing):
    """A matrix on a device: products read rows of the compute type, whatever the format of the weight is."""

    @property
    def rows(self) -> RowType:
        """`bf16` stands for the compute type, where that has 16 bits."""
        return RowType.f32 if self.parts[0][1].name == "f32" else RowType.bf16


@dataclass(frozen=True, slots=True)
class RowsView:
    """The first rows of a static tensor [rows, width]: how many is chosen when a call is bound to a size of step."""

    whole: torch.Tensor

    def of(self, num_rows: int) -> torch.Tensor:
        """Return the first `num_rows` rows."""
        return self.whole[:num_rows]


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """An op of a plan with its values."""

    name: str
    function: Callable[..., None]
    values: dict[str, Any]

    def bind(self, step: StepMemory, num_rows: int) -> Callable[[], None]:
        """Return the call for steps of `num_rows` rows; views are made once."""
        given = {
            name: value.of(num_rows) if isinstance(value, RowsView) else value for name, value in self.values.items()
        }
        return lambda: self.function(step, **given)


Functions = Mapping[str, Callable[..., None]]
"""Functions in the place of references, by the op's name."""


class Kernels(Protocol):
    """Functions of a plan in the places of references: `TritonOps`."""

    functions: Functions

    def prepare(self, calls: Sequence[DeviceCall]) -> None:
        """Allocate the scratch memory of these calls."""

    def gather(self, num_rows: int) -> None:
        """Begin a step, as `StepMemory.gather`."""

    def fuse(self, calls: Sequence[DeviceCall]) -> list[DeviceCall]:
        """Return the calls of a step of one row."""


class DevicePlan:
    """A program's calls and the static memory they work in.

    Attributes:
        step: what a step is made of. body, head: the calls.
        hidden: fp32 [max_tokens, E]; logits: fp32 [max_logit_rows, V].
        graph_pool: memory that all graphs share; None without a card.
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[int, torch.Tensor],
        kv_layers: Sequence[KvView],
        step: StepMemory,
        dtype: torch.dtype,
        kernels: Kernels | None = None,
    ) -> None:
        """`weights`: by the id of the parameter. `kernels`: None: references alone.

        Raises: NotTraceableError for an op that is not in the table.
        """
        self.step, self.kernels = step, kernels
        to = DeviceEmitter(weights, kv_layers, step, dtype, {} if kernels is None else kernels.functions)
        to.allocate(place_buffers(program.body, program.hidden), len(step.given))
        self.body = to.emit(program.body)
        self.hidden = to.tensor(program.hidden)
        to.allocate(place_buffers(program.head, program.logits, (program.hidden,)), len(step.logit_rows))
        self.head = to.emit(program.head)
        self.logits = to.tensor(program.logits)
        if kernels is not None:
            kernels.prepare([*self.body, *self.head])
        self.graph_pool = torch.cuda.graph_pool_handle() if step.device.type == "cuda" else None
        self._bodies = SizedSteps(self._calls_of_body, self.graph_pool)
        self._heads = SizedSteps(self._calls_of_head, self.graph_pool)

    def run_body(self, num_rows: int) -> None:
        """Compute the hidden states of the step that `step` describes. `num_rows`: its size, padding included."""
        self._bodies.run(num_rows, self.step.has_decodes, self.step.has_prompts)

    def run_head(self, num_rows: int) -> None:
        """Compute the logits of the step's first `num_rows` logit rows."""
        self._heads.run(num_rows)

    def _calls_of_body(self, num_rows: int, has_decodes: bool, has_prompts: bool) -> list[Callable[[], None]]:
        """Kernels read from `step` which of both it has while their calls are made for the first time."""
        gather, body = self.step.gather, self.body
        if self.kernels is not None:
            gather = self.kernels.gather
            body = self.kernels.fuse(body) if num_rows == 1 else body
        return [lambda: gather(num_rows), *(call.bind(self.step, num_rows) for call in body)]

    def _calls_of_head(self, num_rows: int) -> list[Callable[[], None]]:
        return [self._of_head(call).bind(self.step, num_rows) for call in self.head]

    def _of_head(self, call: DeviceCall) -> DeviceCall:
        """Its first call reads rows of the hidden states anywhere in the step."""
        if not call.values.get("from_logit_rows"):
            return call
        return DeviceCall(call.name, call.function, {**call.values, "x": call.values["x"].whole})


class DeviceEmitter:
    """An `Emitter` (`kernels/instruction.py`) that makes `DeviceCall`s."""

    def __init__(
        self,
        weights: Mapping[int, torch.Tensor],
        kv_layers: Sequence[KvView],
        step: StepMemory,
        dtype: torch.dtype,
        functions: Functions,
    ) -> None:
        self._weights, self._kv_layers, self._step = weights, kv_layers, step
        self._dtype, self._functions = dtype, functions
        self._rows: dict[Buffer, torch.Tensor] = {}
        self._calls: list[DeviceCall] = []
        self._parameter_types = parameter_types()

    def emit(self, instructions: Sequence[Instruction]) -> list[DeviceCall]:
        """Return the calls of these instructions."""
        self._calls = []
        for instruction in instructions:
            instruction.emit(self)  # type: ignore[arg-type]  # addresses are tensors here
        return self._calls

    def allocate(self, chosen: BufferPlaces, num_rows: int) -> None:
        """Give buffers their memory, of `num_rows` rows each; those of one place share bytes."""
        device = self._step.device
        memory = [torch.zeros(num_rows * row_bytes, dtype=torch.uint8, device=device) for row_bytes in chosen.row_bytes]
        for buffer, place in chosen.places.items():
            dtype = torch.float32 if buffer.type == RowType.f32 else self._dtype
            used = num_rows * buffer.width * dtype.itemsize
            self._rows[buffer] = memory[place][:used].view(dtype).view(num_rows, buffer.width)

    def tensor(self, buffer: Buffer) -> torch.Tensor:
        """Return a buffer's memory. Shapes: [rows, width]."""
        return self._rows[buffer]

    # --- See `Emitter` ----------------------------------------------------------------------

    def push(self, op: str, **values: Any) -> None:
        values.pop("parts", None)
        function = self._functions.get(op, OPS.get(op))
        if function is None:
            raise NotTraceableError(f"the operation {op} on a device")
        self._calls.append(DeviceCall(op, function, {name: self._value(value) for name, value in values.items()}))

    def _value(self, value: Any) -> Any:
        if isinstance(value, Buffer | Columns):
            return self.rows(value)
        return self._weights[id(value)] if isinstance(value, self._parameter_types) else value

    def rows(self, value: Buffer | Columns, stride_bytes: int | None = None) -> RowsView:
        if isinstance(value, Columns):
            return RowsView(self._rows[value.buffer][:, value.start : value.start + value.width])
        return RowsView(self._rows[value])

    address = rows

    def constant(self, values: Any) -> torch.Tensor:
        return torch.tensor(values.tolist(), dtype=torch.float32, device=self._step.device)

    def counters(self, instruction: Instruction, count: int) -> None:
        return None

    def kv_layer(self, layer_index: int) -> KvView:
        return self._kv_layers[layer_index]

    def exchange(self) -> int:
        raise NotTraceableError("a collective of several ranks on a device")

    def ahead(self, instruction: Instruction) -> None:
        return None

    def adapter_site(self, weight: Any) -> None:
        return None


# --- Graphs -----------------------------------------------------------------------------------------------------


def step_size(number: int) -> int:
    """Return the size of the captured steps that hold these rows: padding is at most a sixteenth beyond 128 rows."""
    if number <= 8:
        return 1 << max(number - 1, 0).bit_length()
    grain = max(8, 1 << max((number - 1).bit_length() - 5, 0))
    return -(-number // grain) * grain


class Steps:
    """Steps of one size: the first runs its calls, the second is captured as a graph, and all later ones replay it.

    The first run loads what a capture may not load: compiled kernels and cuBLAS's. Without a card the calls are made
    each time, under a guard that fails where a graph could not be captured.
    """

    captures = True
    """False: each step makes its calls, as benchmarks ask for."""

    def __init__(self, calls: list[Callable[[], None]], pool: Any) -> None:
        """`pool`: the memory that all graphs share for what their calls allocate; None without a card."""
        self._calls, self._pool, self._has_run = calls, pool, False
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Launch one step."""
        if self._pool is None:
            with HostReadGuard():  # type: ignore[no-untyped-call]  # its base has no annotations
                self._make_calls()
            return
        if not (self._has_run and self.captures):
            self._make_calls()
            self._has_run = True
            return
        if self._graph is None:
            self._graph = self._capture()
        self._graph.replay()

    def _make_calls(self) -> None:
        for call in self._calls:
            call()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._make_calls()
            finally:  # else every later call of this device fails
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph


class SizedSteps:
    """Steps of every size that has come so far."""

    def __init__(self, make_calls: Callable[..., list[Callable[[], None]]], pool: Any) -> None:
        """`make_calls`: returns the calls of the size that its arguments say; `pool`: see `Steps`."""
        self._make_calls, self._pool = make_calls, pool
        self._by_size: dict[tuple[int, ...], Steps] = {}

    def run(self, *size: int) -> None:
        """Launch one step of a size."""
        if size not in self._by_size:
            self._by_size[size] = Steps(self._make_calls(*size), self._pool)
        self._by_size[size].run()


class HostReadGuard(TorchDispatchMode):
    """Fails where a step reads a value on the host, or makes a shape depend on one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises: AssertionError."""
        masks = args[1] if str(func).startswith("aten.index") and isinstance(args[1], list | tuple) else ()
        is_masked = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if is_masked or any(name in str(func) for name in self.FORBIDDEN):
            raise AssertionError(f"{func} in a step that a graph must be able to capture")
        return func(*args, **(kwargs or {}))
