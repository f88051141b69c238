"""`Placement`: the place of a stored tensor in a model's parameters.

Must not know models: `loader.py` plans the placements. Next to read: `plan/packed_weights.py`.
"""

from dataclasses import dataclass, replace

from quire.weights.quantized import RoundedTensor
from quire.weights.weight_tensor import WeightTensor


@dataclass(frozen=True, slots=True)
class Placement:
    """A stored tensor, or a part of it, becomes rows `first_row` … of a parameter.

    Fields:
        whole, rows, columns: the tensor that `tensor` was cut from, and where; None if it was not, and for all columns.
    """

    tensor: WeightTensor
    parameter_name: str
    first_row: int
    whole: WeightTensor | None = None
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    def rounded(self) -> "Placement":
        """Return the same with values rounded to E4M3, with a scale for each row of the whole tensor."""
        whole = RoundedTensor.of(self.whole or self.tensor)
        columns = slice(None) if self.columns is None else slice(*self.columns)
        return replace(self, tensor=whole if self.rows is None else whole.part(slice(*self.rows), columns))
