"""RMS norm over the last axis, and the instruction of all norms. Next to read: `reference.py`, the definition."""

from dataclasses import dataclass
from typing import Any

import torch

from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import Kernel
from quire.kernels.rms_norm import batched, native, reference
from quire.kernels.tracing import SIZES, Call, norm_sizes

KERNEL = Kernel(
    "rms_norm",
    "rms_norm",
    {"reference": reference.rms_norm, "batched": batched.rms_norm, "native": native.rms_norm},
    preferred={"cpu": "native", "*": "batched"},
)
SIZES["rms_norm"] = norm_sizes


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Scale each row to root mean square 1, then by `weight`.

    out[…, i] = x[…, i] / sqrt(mean_i x[…, i]² + epsilon) · weight[i]     (Zhang & Sennrich 2019)

    Shapes: x [..., E]; weight [E] -> [..., E].
    Dtypes: x, weight bf16, fp16 or fp32; sums in fp32; returns x.dtype.
    """
    return KERNEL.on(x.device.type)(x, weight, epsilon)


@dataclass(eq=False, frozen=True, slots=True)
class Norm(Instruction):
    """RMS norm, or layer norm if `subtract_mean`, of each row or of each of its `groups`, such as heads."""

    x: Columns
    out: Buffer
    weight: Any
    bias: Any
    epsilon: float
    subtract_mean: bool
    groups: int = 1

    def emit(self, to: Emitter) -> None:
        """See `Instruction`."""
        to.push(
            "norm", x=to.rows(self.x), out=to.rows(self.out), weight=to.vector(self.weight), bias=to.vector(self.bias),
            width=self.out.width // self.groups, epsilon=self.epsilon, subtract_mean=self.subtract_mean,
            groups=self.groups,
        )  # fmt: skip

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`."""
        vectors = sum(4 * int(vector.shape[0]) for vector in (self.weight, self.bias) if vector is not None)
        return Cost((6 if self.subtract_mean else 4) * step.num_tokens * self.out.width, vectors)


@lowers("rms_norm")
def _lower(to: Lowering, call: Call) -> None:
    x, weight, epsilon = call.arguments
    if len(x.sizes) == 2 and to.waits(call, ("rope", "rms_norm", "write_kv", "paged_attention")):
        return
    out = to.result(call, takes_type=True)
    to.append(Norm(to.columns(x), out, weight, None, epsilon, False, x.num_columns // x.sizes[-1]))
