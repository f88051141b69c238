"""What a plan consists of before it has addresses: instructions on buffers. One class per native op.

The fields are those of the parameter structs in `native/plan/ops.h`, with buffers in place of addresses and
parameters (`torch.nn.Parameter`, by identity) in place of packed weights. Must not know models.
Next to read: `lower.py`, which makes them, `emit.py`, which gives them addresses.
"""

from dataclasses import dataclass, field
from typing import Any

from quire._native import Activation, RowType


@dataclass(eq=False, slots=True)
class Buffer:
    """[T, width] values that live from the instruction that writes them to the last that reads them."""

    width: int
    type: RowType = RowType.f32

    @property
    def row_bytes(self) -> int:
        """Bytes per row; rows start at multiples of 64."""
        if self.type == RowType.q8:
            used = self.width // 32 * 48
        else:
            used = 4 * self.width if self.type == RowType.f32 else 2 * (self.width + self.width % 2)
        return -(-used // 64) * 64


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns `start` … of an fp32 buffer."""

    buffer: Buffer
    start: int


@dataclass(frozen=True, slots=True)
class Embed:
    """Rows of a table for token ids or positions."""

    table: Any
    out: Buffer
    offset: int
    of_positions: bool


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines [T, D/2] of the step's positions."""

    frequencies: Any
    cos: Buffer
    sin: Buffer


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm if `subtract_mean`."""

    x: Buffer
    out: Buffer
    weight: Any
    bias: Any
    epsilon: float
    subtract_mean: bool


@dataclass(frozen=True, slots=True)
class Gemm:
    """A linear layer with what follows it."""

    weight: Any
    bias: Any
    x: Buffer
    out: Buffer
    activation: Activation = Activation.none
    gated: bool = False
    add: bool = False


@dataclass(frozen=True, slots=True)
class WriteKv:
    """Norms of heads, rotation in place, keys and values to the cache."""

    q: Columns
    k: Columns
    v: Columns
    num_heads: int
    q_norm: Any
    k_norm: Any
    epsilon: float
    rotation: tuple[Buffer, Buffer] | None
    layer_index: int


@dataclass(frozen=True, slots=True)
class Attend:
    """Attention of queries that `WriteKv` has prepared. window 0: to all earlier tokens."""

    q: Columns
    out: Buffer
    num_heads: int
    scale: float
    window: int
    layer_index: int


@dataclass(frozen=True, slots=True)
class Activate:
    """An elementwise function, or with `none` a change of type."""

    x: Buffer
    out: Buffer
    activation: Activation = Activation.none
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Add:
    """out = a + b."""

    a: Buffer
    b: Buffer
    out: Buffer


Instruction = Embed | Rotary | Norm | Gemm | WriteKv | Attend | Activate | Add


@dataclass(slots=True)
class Program:
    """A forward and its head.

    Fields:
        body: up to the hidden states.
        hidden: fp32 [T, E], the body's result.
        head_weight, head_bias: [V, E] and [V] or None, of the one linear layer from hidden states to logits.
        head_input: rows of hidden states in the type that the head reads.
        num_fused: calls that became part of another's instruction, by operation.
    """

    body: list[Instruction]
    hidden: Buffer
    head_weight: Any
    head_bias: Any
    head_input: Buffer
    num_fused: dict[str, int] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """V, columns of the logits."""
        return int(self.head_weight.shape[0])


def touched(instruction: Instruction) -> list[Buffer]:
    """The buffers that an instruction reads or writes."""
    found: list[Buffer] = []
    for name in instruction.__slots__:
        value = getattr(instruction, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Columns):
                found.append(item.buffer)
            elif isinstance(item, Buffer):
                found.append(item)
    return found
