"""`DeepseekV2Config`: the fields of DeepSeek's models in a `config.json`. Next to read: `deepseek_v2.py`."""

import math
from dataclasses import dataclass, replace
from typing import Any

from quire.cache_spec import CacheSpec, LatentKV
from quire.errors import ModelFileError
from quire.kernels.experts import SOFTMAX, ExpertScoring
from quire.models.hf_config import HFConfigReader, check_divides, check_positive, read_sizes
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import read_experts
from quire.models.hf_rope import check_pairs, parameters_of, read_rope

PREDICTORS = ("num_nextn_predict_layers", "num_mtp_layers")
MAX_PREDICTORS = 8
"""Layers that predict further tokens: as many as the tokens of a draft."""


@dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(LlamaConfig):
    """Llama's fields, and those of latent attention and of experts.

    `query_rank`: of the queries' latent, None for none; `kv_rank`, `rotary_size`, `nope_size`, `value_size`: R, C, U
    and O of `kernels.latent_attention`; `is_interleaved`: rotated pairs are neighbours.
    """

    query_rank: int | None
    kv_rank: int
    rotary_size: int
    nope_size: int
    value_size: int
    is_interleaved: bool = True
    required = {"moe_layer_freq": 1}
    unused = (
        "head_dim", "qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha", "quantization_config",
    )  # fmt: skip
    """Sums of other fields, of training, and what the tensors' formats tell."""
    default_dense_layers = 0
    default_shared_experts = 2
    default_predictors = 0

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        cls.check_activation(reader)
        rank, rotary = reader.integer("kv_lora_rank"), reader.integer("qk_rope_head_dim")
        check_divides("2, the size of a rotated pair", 2, "qk_rope_head_dim", rotary)
        check_divides("2", 2, "kv_lora_rank", rank)
        fields = read_sizes(reader, head_size=rank + rotary)
        reader.require("num_key_value_heads", fields["num_heads"])
        nope, value = reader.integer("qk_nope_head_dim"), reader.integer("v_head_dim")
        rope_config = read_rope(reader)
        check_pairs(rope_config, rotary)
        has_bias = reader.flag("attention_bias", False)
        counts = cls.default_dense_layers, cls.default_shared_experts, cls.default_predictors
        experts = read_routed_experts(reader, fields, *counts)
        return (
            fields
            | experts
            | {
                "context_len": rope_config.stretched(fields["context_len"]),
                "intermediate_size": reader.integer("intermediate_size"),
                "num_kv_heads": 1,
                "rms_norm_epsilon": reader.number("rms_norm_eps", 1e-6),
                "rope": rope_config,
                "qkv_bias": has_bias,
                "output_bias": has_bias,
                "mlp_bias": reader.flag("mlp_bias", False),
                "score_scale": (nope + rotary) ** -0.5 * read_score_factor(reader),
                "query_rank": reader.optional_integer("q_lora_rank"),
                "kv_rank": rank,
                "rotary_size": rotary,
                "nope_size": nope,
                "value_size": value,
                **cls.read_routing(reader, experts),
            }
        )

    @classmethod
    def read_routing(cls, reader: HFConfigReader, experts: dict[str, Any]) -> dict[str, Any]:
        """Read how experts are chosen and weighed."""
        reader.choice("scoring_func", "softmax", ["softmax"])
        reader.require("norm_topk_prob", False)
        method = reader.choice("topk_method", "greedy", ["greedy", "group_limited_greedy"])
        groups = read_groups(reader, experts, 1, 1)
        factor = reader.number("routed_scaling_factor", 1.0)
        is_limited = method == "group_limited_greedy"
        return {"renormalise": False, "scoring": replace(groups if is_limited else SOFTMAX, factor=factor)}

    def kv_specs(self) -> list[CacheSpec]:
        return [LatentKV(self.kv_rank, self.rotary_size, 1)] * self.num_layers


def read_routed_experts(
    reader: HFConfigReader, fields: dict[str, Any], dense: int, shared: int, predictors: int, *names: str
) -> dict[str, Any]:
    """Read experts in all but the first layers, those that all tokens use, and layers that predict further tokens.

    `dense`, `shared`, `predictors`: defaults of the numbers of layers without experts, of shared experts, and of layers
    that predict, which checkpoints and Transformers name differently. `names`: further ones of the number of experts.
    """
    size = reader.integer("moe_intermediate_size")
    experts = read_experts(reader, {**fields, "intermediate_size": size}, ("n_routed_experts", *names))
    first = reader.integer("first_k_dense_replace", dense, minimum=0)
    found = [reader.optional_integer(name, minimum=0, maximum=MAX_PREDICTORS) for name in PREDICTORS]
    return experts | {
        "shared_size": size * reader.integer("n_shared_experts", shared),
        "sparse_layers": tuple(index >= first for index in range(fields["num_layers"])),
        "num_predictors": next((count for count in found if count is not None), predictors),
    }


def read_groups(reader: HFConfigReader, experts: dict[str, Any], count: int, chosen: int) -> ExpertScoring:
    """Read the groups of experts. `count`, `chosen`: defaults. Raises: ModelFileError for groups that do not fit."""
    num_groups, top_groups = reader.integer("n_group", count), reader.integer("topk_group", chosen)
    check_divides("n_group", num_groups, "n_routed_experts", experts["num_experts"])
    size = experts["num_experts"] // num_groups
    if top_groups > num_groups or top_groups * size < experts["top_k"]:
        least = -(-experts["top_k"] // size)
        raise ModelFileError(
            f"the model's config has topk_group={top_groups} of n_group={num_groups} groups of {size} experts: set "
            f"topk_group to {least} … {num_groups}, which leaves num_experts_per_tok={experts['top_k']} to choose from"
        )
    return ExpertScoring(num_groups=num_groups, top_groups=top_groups)


def read_score_factor(reader: HFConfigReader) -> float:
    """Read the factor of scores with YaRN: (0.1 · mscale_all_dim · ln(factor) + 1)²."""
    values = parameters_of(reader, "rope_scaling") | parameters_of(reader, "rope_parameters")
    scale = values.get("mscale_all_dim")
    if not scale or values.get("rope_type", values.get("type", "default")) == "default":
        return 1.0
    growth = check_positive("mscale_all_dim", scale) * math.log(max(values["factor"], 1.0))
    return float((0.1 * growth + 1) ** 2)
