"""DeepSeek-V3 and R1: DeepSeek-V2 with sigmoid scores of experts, corrected for the choice, in groups.

The layer that predicts further tokens is a `Predictor`. Next to read: `deepseek_v2.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from quire.models.deepseek_v2 import DeepseekV2ForCausalLM
from quire.models.hf_config import HFConfigReader
from quire.models.hf_deepseek import DeepseekV2Config, read_groups


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepseekV2Config):
    """DeepSeek-V2's fields."""

    required = {**DeepseekV2Config.required, "mlp_bias": False}
    default_dense_layers = 3
    default_shared_experts = 1
    default_predictors = 1

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        is_interleaved = reader.flag("rope_interleave", True)
        return super().read(reader) | {"is_interleaved": is_interleaved}

    @classmethod
    def read_routing(cls, reader: HFConfigReader, experts: dict[str, Any]) -> dict[str, Any]:
        reader.choice("scoring_func", "sigmoid", ["sigmoid"])
        reader.choice("topk_method", "noaux_tc", ["noaux_tc"])
        factor, groups = reader.number("routed_scaling_factor", 2.5), read_groups(reader, experts, 8, 4)
        scoring = replace(groups, is_sigmoid=True, factor=factor, group_best=2)
        return {"renormalise": reader.flag("norm_topk_prob", True), "scoring": scoring}


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V2 with another choice of experts."""

    Config = DeepseekV3Config


ARCHITECTURES = {"DeepseekV3ForCausalLM": DeepseekV3ForCausalLM}
