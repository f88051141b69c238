"""Activations of the MLP, plain and as gates. Next to read: `reference.py`, the definitions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire._native import Activation
from quire.kernels.activations import batched, reference
from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import Kernel
from quire.kernels.tracing import SIZES, TORCH_FUNCTIONS, Call, NotTraceableError, Symbol, same_sizes

ACTIVATE = Kernel(
    "activations",
    "activate",
    {"reference": reference.activate, "batched": batched.activate},
    preferred={"*": "batched"},
)
GATE = Kernel("activations", "gate", {"reference": reference.gate, "batched": batched.gate}, preferred={"*": "batched"})


def activate(x: torch.Tensor, name: str) -> torch.Tensor:
    """Apply an elementwise function, by name.

    silu: x / (1 + exp(-x));  relu: max(x, 0);  relu2: max(x, 0)²     (So 2021)
    gelu: x · Φ(x), Φ the normal distribution function     (Hendrycks & Gimpel 2016)
    gelu_tanh: x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))     (ibid.)

    Shapes: x [...] -> [...]. Dtypes: bf16, fp16 or fp32, returned the same.
    """
    return ACTIVATE.on(x.device.type)(x, name)


def gate(gate_up: torch.Tensor, name: str) -> torch.Tensor:
    """Gate the second half of each row by the activation of the first.

    out[…, i] = activation(gate_up[…, i]) · gate_up[…, F + i]     (Shazeer 2020)

    Shapes: gate_up [..., 2F] -> [..., F]. Dtypes: bf16, fp16 or fp32, returned the same.
    """
    return GATE.on(gate_up.device.type)(gate_up, name)


def _named(apply: Callable[[torch.Tensor, str], torch.Tensor], name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: apply(x, name)


silu, gelu, gelu_tanh = _named(activate, "silu"), _named(activate, "gelu"), _named(activate, "gelu_tanh")
relu, relu2 = _named(activate, "relu"), _named(activate, "relu2")
silu_and_mul, gelu_and_mul = _named(gate, "silu"), _named(gate, "gelu")
gelu_tanh_and_mul = _named(gate, "gelu_tanh")
relu_and_mul, relu2_and_mul = _named(gate, "relu"), _named(gate, "relu2")


@dataclass(eq=False, frozen=True, slots=True)
class Activate(Instruction):
    """An activation of a value, or with `gated` of its first half, times the second."""

    x: Columns
    out: Buffer
    activation: Activation
    gated: bool

    def emit(self, to: Emitter) -> None:
        """See `Instruction`."""
        to.push(
            "activate", x=to.rows(self.x), out=to.rows(self.out), width=self.out.width, activation=self.activation,
            gated=self.gated,
        )  # fmt: skip

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`. An activation counts as 10 operations."""
        return Cost(10 * step.num_tokens * self.out.width)


@lowers("activate", "gate")
def _lower(to: Lowering, call: Call) -> None:
    x, name = call.arguments
    to.append(Activate(to.columns(x), to.result(call, takes_type=True), Activation[name], call.operation == "gate"))


def _gate_sizes(x: Symbol, name: str) -> tuple[int, ...]:
    if len(x.sizes) != 1 or x.sizes[0] % 2:
        raise NotTraceableError(f"a gate over {x}")
    return (x.sizes[0] // 2,)


SIZES.update(activate=same_sizes, gate=_gate_sizes)


def _record(name: str) -> Callable[..., Any]:
    """Return the recorder of PyTorch's own function."""

    def record(x: Any, *, approximate: str = "none", inplace: bool = False) -> Any:
        if inplace or approximate not in ("none", "tanh"):
            raise NotTraceableError(f"torch's {name} with options")
        return activate(x, "gelu_tanh" if approximate == "tanh" else name)

    return record


TORCH_FUNCTIONS.update({name: _record(name) for name in ("silu", "gelu", "relu")})
