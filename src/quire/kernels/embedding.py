"""Rows of a table for token ids or positions.

Next to read: `layers/embedding.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.kernels.instruction import Buffer, Cost, Emitter, Instruction, Packing, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.registry import kernel
from quire.kernels.tracing import SIZES, TORCH_FUNCTIONS, Call, NotTraceableError, Symbol
from quire.lazy_torch import Tensor, functional


@kernel
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """out[t] = table[ids[t]].

    Shapes: ids [T]; table [N, E] -> [T, E]. Dtypes: ids int64; table any, returned the same.
    """
    return functional.embedding(ids, table)


@dataclass(eq=False, frozen=True, slots=True)
class Embed(Instruction):
    """out[t] = weight[id + offset], the ids being the step's tokens or its positions.

    Rows are packed 16 to a tile, which share what they are read with.
    """

    is_lookup = True
    weight: Any
    packing: Packing
    out: Buffer
    offset: int
    of_positions: bool

    def emit(self, to: Emitter) -> None:
        to.push("embed", table=self.weight, out=self.out, offset=self.offset, of_positions=self.of_positions)

    def cost(self, step: StepShape) -> Cost:
        num_rows, num_inputs = self.weight.shape
        num_tiles = -(-num_rows // 16)
        return Cost(bytes_read=step.num_tokens * self.packing.num_bytes(num_inputs) // (16 * num_tiles))


def _sizes(ids: Symbol, table: Any) -> tuple[int, ...]:
    return (table.shape[1],)


SIZES["embedding"] = _sizes


def _record(ids: Any, table: Any, *_: Any, **options: Any) -> Symbol:
    """Record a call of PyTorch's own function."""
    if not isinstance(ids, Symbol) or options.get("max_norm") is not None:
        raise NotTraceableError("torch's embedding with options")
    recorded: Symbol = embedding(ids, table)  # type: ignore[arg-type, assignment]
    return recorded


TORCH_FUNCTIONS["embedding"] = _record


@lowers("token_ids", "positions", "shift")
def _lower_ids(to: Lowering, call: Call) -> None:
    """Ids are part of the embedding that reads them."""


@lowers("embedding")
def _lower(to: Lowering, call: Call) -> None:
    ids, table = call.arguments
    offset = 0
    while ids.call.operation == "shift":
        ids, constant = ids.call.arguments
        offset += constant
    of_positions = ids.call.operation == "positions"
    if not of_positions and ids.call.operation != "token_ids":
        raise NotTraceableError("an embedding of other things than token ids and positions")
    to.append(Embed(table, to.packing_of(table), to.result(call), offset, of_positions))
