"""`MoE`, and `read_experts` and `read_moe`: mixtures of experts of a config, and their fields in a `config.json`.

Next to read: `qwen3_moe.py`; `layers/experts.py` for its parts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire import nn
from quire.errors import ModelFileError
from quire.kernels.experts import route
from quire.layers.experts import Experts, Router
from quire.layers.group import Group
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader, wrong
from quire.models.hf_llama import LlamaConfig

TRAINING_FIELDS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Of losses and noise, which are not used."""
MAX_EXPERTS_OF_LAYER = 4096
"""Twice as many as any published model has. Reading a model takes 20 µs and 1.6 KB for each expert."""
MAX_EXPERTS = 1 << 16
"""Of all layers; Kimi K2 has 23,040. A config with more is corrupted; naming the tensors of 10,000,000 takes all
memory."""


class MoE(nn.Module):
    """The weighted sum of the `top_k` experts of each token that its router chooses. Shapes: x [T, E] -> [T, E].

    With `renormalise` of the config, the weights of the chosen experts sum up to 1, before `scoring` multiplies them.
    A subclass may set another `activation`, and `bias` of all projections.
    """

    activation = "silu"
    bias = False

    def __init__(self, config: LlamaConfig, group: Group) -> None:
        super().__init__()
        width, num_experts = config.hidden_size, config.num_experts
        self.gate = Router(width, num_experts, bias=self.bias, corrects=config.scoring.is_sigmoid)
        self.experts = Experts(width, config.expert_size, num_experts, self.activation, group, bias=self.bias)
        self.rule = config.top_k, config.renormalise, config.scoring

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, route(self.gate(x), *self.rule, self.gate.e_score_correction_bias))


def read_sparse_layers(reader: HFConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have experts instead of an MLP. Raises: ModelFileError for layers that are not there."""
    period, dense = reader.integer("decoder_sparse_step", 1), reader.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < num_layers for index in dense):
        raise wrong("mlp_only_layers", dense, f"a list of layers from 0 to {num_layers - 1}")
    return tuple(index not in dense and (index + 1) % period == 0 for index in range(num_layers))


def most_experts(fields: Mapping[str, Any]) -> int:
    """Return the most experts of one layer."""
    return min(MAX_EXPERTS_OF_LAYER, MAX_EXPERTS // fields["num_layers"])


def read_experts(
    reader: HFConfigReader,
    fields: Mapping[str, Any],
    names: Sequence[str] = ("num_experts", "num_local_experts"),
    chosen: str = "num_experts_per_tok",
) -> dict[str, Any]:
    """Read experts of every layer, which are as wide as `fields` say of the MLP: `num_experts`, and `top_k`.

    `names`, `chosen`: of the number of experts, and of those of a token. Raises: ModelFileError where the names
    disagree, or a token cannot use as many of the experts.
    """
    for name in TRAINING_FIELDS:
        reader.raw(name)
    maximum = most_experts(fields)
    found = {name: reader.optional_integer(name, maximum=maximum) for name in names}
    counts = {name: value for name, value in found.items() if value is not None}
    if len(set(counts.values())) > 1:
        shown = " and ".join(f"{name}={value}" for name, value in counts.items())
        raise ModelFileError(f"the model's config has {shown}, two names of one number: remove the wrong one")
    count = next(iter(counts), names[0])
    num_experts, top_k = reader.integer(count), reader.integer(chosen)
    if top_k > num_experts:
        raise ModelFileError(
            f"the model's config has {chosen}={top_k}, more than {count}={num_experts}: "
            f"set {chosen} to at most {num_experts}"
        )
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "expert_size": fields["intermediate_size"],
        "sparse_layers": (True,) * fields["num_layers"],
    }


def read_moe(
    reader: HFConfigReader, fields: Mapping[str, Any], *, renormalises: bool = False, expert_size: int | None = None
) -> dict[str, Any]:
    """Read experts of a width of their own, in all layers or in some. `renormalises`, `expert_size`: the defaults."""
    return read_experts(reader, fields) | {
        "renormalise": reader.flag("norm_topk_prob", renormalises),
        "expert_size": reader.integer("moe_intermediate_size", expert_size),
        "sparse_layers": read_sparse_layers(reader, fields["num_layers"]),
    }
