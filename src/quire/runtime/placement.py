"""`Placement`: the place of a stored tensor in a model's parameters.

Must not know models: `loader.py` plans the placements. Next to read: `plan/packed_weights.py`.
"""

from dataclasses import dataclass

from quire.weights.weight_tensor import WeightTensor


@dataclass(frozen=True, slots=True)
class Placement:
    """A stored tensor, or a part of one, becomes rows `first_row` … of a parameter."""

    tensor: WeightTensor
    parameter_name: str
    first_row: int
