"""Rotary position embedding, rotate-half form. Next to read: `layers/rotary.py` for the angles."""

from dataclasses import dataclass
from typing import Any

from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.tracing import SIZES, Call, NotTraceableError, Symbol
from quire.lazy_torch import Tensor, torch


@kernel.with_traits(takes_in=("rope", "rms_norm"))
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pair (i, i + C/2) of each head by its token's angle of frequency i; values from C on stay.

    out[t, h, i]       = x[t, h, i] · cos[t, i] - x[t, h, i + C/2] · sin[t, i]
    out[t, h, i + C/2] = x[t, h, i + C/2] · cos[t, i] + x[t, h, i] · sin[t, i]     for i < C/2     (Su 2021, eq. 34)

    Shapes: x [T, H, D] (may be strided over T); cos, sin [T, C] with C ≤ D -> [T, H, D].
        cos and sin hold the C/2 angles twice, and in the first half of `sin` with the sign of the formula: sin[t, i] is
        stored as -sin, sin[t, i + C/2] as +sin.
    Dtypes: x bf16, fp16 or fp32; cos, sin fp32; computed in fp32; returns x.dtype.
    """
    num_rotated = cos.shape[-1]
    wide = x[..., :num_rotated].float()
    # `roll` brings each value's partner into its place; the sign lies in `sin`.
    rotated = wide * cos[:, None] + wide.roll(num_rotated // 2, -1) * sin[:, None]
    return torch.cat((rotated.to(x.dtype), x[..., num_rotated:]), -1)


@dataclass(eq=False, frozen=True, slots=True)
class Rotary(Instruction):
    """Cosines and sines [T, C/2] of the step's positions, times scales[position // period] if there are scales.

    A pair of them counts as 40 operations.
    """

    is_repeated = True
    frequencies: Any
    cos: Buffer
    sin: Buffer
    scales: Any = None
    period: int = 1

    def emit(self, to: Emitter) -> None:
        options = {}
        if self.scales is not None:
            options = {"scales": to.constant(self.scales), "num_scales": len(self.scales), "scale_period": self.period}
        cos, sin, half = to.address(self.cos), to.address(self.sin), self.cos.width
        to.push("rotary", frequencies=to.constant(self.frequencies), cos=cos, sin=sin, half=half, **options)

    def cost(self, step: StepShape) -> Cost:
        return Cost(40 * step.num_tokens * self.cos.width)


@dataclass(eq=False, frozen=True, slots=True)
class Rope(Instruction):
    """Heads rotated, where attention does not do it in place."""

    x: Columns
    out: Buffer
    num_heads: int
    rotation: tuple[Buffer, Buffer]

    def emit(self, to: Emitter) -> None:
        cos, sin = self.rotation
        to.push(
            "rope",
            x=self.x,
            out=self.out,
            num_heads=self.num_heads,
            head_size=self.out.width // self.num_heads,
            cos=to.address(cos),
            sin=to.address(sin),
            half=cos.width,
        )

    def cost(self, step: StepShape) -> Cost:
        return Cost(6 * step.num_tokens * self.num_heads * self.rotation[0].width)


def rotation_of(to: Lowering, call: Call) -> tuple[Buffer, Buffer]:
    """Cosines and sines of a call of `rope`. Raises: NotTraceableError if they are not those of the model."""
    _, cos, sin = call.arguments
    rotation: tuple[Buffer, Buffer] | None = to.notes.get(cos.call)
    if rotation is None or sin.call is not cos.call or cos.start >= sin.start:
        raise NotTraceableError("a rotation by other angles than the model's")
    return rotation


@lowers("rotation")
def _lower_rotation(to: Lowering, call: Call) -> None:
    positions, frequencies, scales, period = call.arguments
    if positions.call.operation != "positions":
        raise NotTraceableError("a rotation by other things than positions")
    half = frequencies.shape[0]
    cos, sin = to.notes[call] = Buffer(half), Buffer(half)
    to.append(Rotary(frequencies, cos, sin, scales, period))


@lowers("rope")
def _lower_rope(to: Lowering, call: Call) -> None:
    x = call.arguments[0]
    if not to.waits(call):
        to.append(Rope(to.columns(x), to.result(call), x.sizes[0], rotation_of(to, call)))


def _sizes(x: Symbol, cos: Symbol, sin: Symbol) -> tuple[int, ...]:
    if len(x.sizes) != 2 or cos.sizes != sin.sizes or cos.sizes[0] > x.sizes[1]:
        raise NotTraceableError(f"a rotation of {x} by angles {cos}")
    return x.sizes


SIZES["rope"] = _sizes
