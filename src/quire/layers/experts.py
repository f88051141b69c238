"""`Router` and `Experts`, the parts of `models.hf_moe.MoE`. Next to read: `kernels/experts.py`."""

from quire import nn
from quire.kernels.experts import experts
from quire.layers.group import Group, Partition, Share, share
from quire.layers.linear import Linear
from quire.lazy_torch import Tensor


class Router(Linear):
    """The logit of each expert, the same on every rank.

    Its weight is not quantised at load: a small error may choose another expert. With `corrects`, it keeps what is
    added to the experts' scores for the choice alone, `e_score_correction_bias` [X]. Shapes: x [T, E] -> [T, X].
    """

    def __init__(self, hidden_size: int, num_experts: int, *, bias: bool = False, corrects: bool = False) -> None:
        super().__init__(hidden_size, num_experts, bias=bias)
        self.weight.keeps_dtype = True
        self.e_score_correction_bias = nn.Parameter(nn.empty(num_experts)) if corrects else None


class Experts(nn.Module):
    """The gated MLPs of X experts, one below the other in each parameter. A rank has some inner columns of each.

    Checkpoints store each expert's matrices and biases apart, or those of all experts as stacks.
    Shapes: x [T, E], weights [T, X] -> [T, E]; gate_up_proj [X · 2F, E], per expert gates, then ups; down_proj
    [X · E, F]; with `bias`, gate_up_proj_bias and down_proj_bias have a value per row.
    """

    def __init__(
        self, hidden_size: int, inner_size: int, num_experts: int, activation: str, group: Group, *, bias: bool
    ) -> None:
        super().__init__()
        inner, whole = share("MLP columns of an expert", inner_size, group), Share(0, hidden_size, hidden_size)
        self.activation, self.group = activation, group
        gate_up, down = (num_experts * 2 * inner.size, hidden_size), (num_experts * hidden_size, inner.size)
        self.gate_up_proj, self.down_proj = nn.Parameter(nn.empty(*gate_up)), nn.Parameter(nn.empty(*down))
        biases = [nn.Parameter(nn.empty(rows)) if bias else None for rows, _ in (gate_up, down)]
        self.gate_up_proj_bias, self.down_proj_bias = biases
        rows = Partition(rows=(inner,) * (2 * num_experts))
        self.partitions = {
            "gate_up_proj": rows,
            "gate_up_proj_bias": rows,
            "down_proj": Partition(rows=(whole,) * num_experts, columns=inner),
            "down_proj_bias": Partition(rows=(whole,) * num_experts),
        }
        self.num_stacked, self.stored_parts = num_experts, dict[str, tuple[str, ...]]()
        names = [f"experts.{index}" for index in range(num_experts)]
        for suffix, kind in (("", "weight"), ("_bias", "bias")):
            gates_ups = tuple(f"{name}.{part}_proj.{kind}" for name in names for part in ("gate", "up"))
            self.stored_parts[f"gate_up_proj{suffix}"] = gates_ups
            self.stored_parts[f"down_proj{suffix}"] = tuple(f"{name}.down_proj.{kind}" for name in names)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        # Rank 0 adds the bias of all.
        down_bias = self.down_proj_bias if self.group.rank == 0 else None
        weights_and_biases = (self.gate_up_proj, self.down_proj, self.activation, self.gate_up_proj_bias, down_bias)
        results = experts(x, weights, *weights_and_biases)
        return self.group.all_reduce(results)
