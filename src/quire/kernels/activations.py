"""Activations of the MLP, plain and as gates. Next to read: `linear.py`, whose instruction takes them in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire._native import Activation
from quire.kernels.elementwise import Elementwise
from quire.kernels.instruction import Buffer, Columns
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.rms_norm import lower_gated_input
from quire.kernels.tracing import SIZES, TORCH_FUNCTIONS, Call, NotTraceableError, Symbol, same_sizes
from quire.lazy_torch import Tensor, functional

Function = Callable[[Tensor], Tensor]
OPERATORS: dict[str, Function] = {
    "silu": lambda x: functional.silu(x),
    "gelu": lambda x: functional.gelu(x),
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": lambda x: functional.relu(x),
    "relu2": lambda x: functional.relu(x).square(),
}


@kernel
def activate(x: Tensor, name: str) -> Tensor:
    """Apply an elementwise function, by name.

    silu: x / (1 + exp(-x));  relu: max(x, 0);  relu2: max(x, 0)²     (So 2021)
    gelu: x · Φ(x), Φ the normal distribution function     (Hendrycks & Gimpel 2016)
    gelu_tanh: x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))     (ibid.)

    Shapes: x [...] -> [...]. Dtypes: bf16, fp16 or fp32, returned the same.
    """
    return OPERATORS[name](x)


@kernel
def gate(gate_up: Tensor, name: str) -> Tensor:
    """Gate the second half of each row by the activation of the first.

    out[…, i] = activation(gate_up[…, i]) · gate_up[…, F + i]     (Shazeer 2020)

    Shapes: gate_up [..., 2F] -> [..., F]. Dtypes: bf16, fp16 or fp32, returned the same.
    """
    first, up = gate_up.chunk(2, dim=-1)
    return OPERATORS[name](first) * up


def _named(apply: Callable[[Tensor, str], Tensor], name: str) -> Function:
    return lambda x: apply(x, name)


silu, gelu, gelu_tanh = _named(activate, "silu"), _named(activate, "gelu"), _named(activate, "gelu_tanh")
relu, relu2 = _named(activate, "relu"), _named(activate, "relu2")
silu_and_mul, gelu_and_mul = _named(gate, "silu"), _named(gate, "gelu")
gelu_tanh_and_mul = _named(gate, "gelu_tanh")
relu_and_mul, relu2_and_mul = _named(gate, "relu"), _named(gate, "relu2")


@dataclass(eq=False, frozen=True, slots=True)
class Activate(Elementwise):
    """An activation of a value, or with `gated` of its first half, times the second."""

    op, flops = "activate", 10
    x: Columns
    out: Buffer
    activation: Activation
    gated: bool


@lowers("activate", "gate")
def _lower(to: Lowering, call: Call) -> None:
    """Fused: a norm of the product with a known value, as behind a state space."""
    if call.operation == "activate" and lower_gated_input(to, call):
        return
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
