"""`SparseMLP`: a router and its experts, of which each token uses a few. Next to read: `kernels/experts.py`."""

import torch
from torch import nn

from quire.kernels.experts import experts, route
from quire.layers.group import Group, Partition, Share, share
from quire.layers.linear import Linear


class Router(Linear):
    """The logit of each expert, the same on every rank.

    Its weight is not quantised at load: a small error may choose another expert. Shapes: x [T, E] -> [T, X].
    """

    def __init__(self, hidden_size: int, num_experts: int) -> None:
        super().__init__(hidden_size, num_experts)
        self.weight.keeps_dtype = True  # type: ignore[attr-defined]


class Experts(nn.Module):
    """The gated MLPs of X experts, one below the other in each parameter. A rank has some inner columns of each.

    Shapes: x [T, E], weights [T, X] -> [T, E]; gate_up_proj [X · 2F, E], per expert gates, then ups; down_proj
    [X · E, F].
    """

    def __init__(self, hidden_size: int, inner_size: int, num_experts: int, activation: str, group: Group) -> None:
        super().__init__()
        inner, whole = share("MLP columns of an expert", inner_size, group), Share(0, hidden_size, hidden_size)
        self.activation, self.group = activation, group
        gate_up, down = torch.empty(num_experts * 2 * inner.size, hidden_size), torch.empty(
            num_experts * hidden_size, inner.size
        )  # fmt: skip
        self.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
        self.down_proj = nn.Parameter(down, requires_grad=False)
        self.partitions = {
            "gate_up_proj": Partition(rows=(inner,) * (2 * num_experts)),
            "down_proj": Partition(rows=(whole,) * num_experts, columns=inner),
        }

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        results = experts(x, weights, self.gate_up_proj, self.down_proj, self.activation)
        return self.group.all_reduce(results)


class SparseMLP(nn.Module):
    """The weighted sum of the `top_k` experts of each token that its router chooses. Shapes: x [T, E] -> [T, E].

    `inner_size`: MLP columns of an expert. `renormalise`: the weights of the chosen experts sum up to 1.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        num_experts: int,
        group: Group,
        *,
        top_k: int,
        renormalise: bool,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        self.gate = Router(hidden_size, num_experts)
        self.experts = Experts(hidden_size, inner_size, num_experts, activation, group)
        self.top_k, self.renormalise = top_k, renormalise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results: torch.Tensor = self.experts(x, route(self.gate(x), self.top_k, self.renormalise))
        return results


def stacked_experts(num_experts: int) -> dict[str, tuple[str, ...]]:
    """Return the `stacked_params` of `Experts`: the stored names of each expert's matrices."""
    names = [f"experts.{index}" for index in range(num_experts)]
    return {
        "experts.gate_up_proj": tuple(f"{name}.{part}_proj.weight" for name in names for part in ("gate", "up")),
        "experts.down_proj": tuple(f"{name}.down_proj.weight" for name in names),
    }
