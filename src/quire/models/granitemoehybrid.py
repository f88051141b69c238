"""Granite 4 without Mamba layers and experts (350m, 1b, micro): Granite 3 under other names, with or without positions.

Next to read: `granite.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from quire.errors import UnsupportedModelError
from quire.kernels.activations import silu_and_mul
from quire.layers.group import SINGLE, Group, share
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.rotary import Rotation
from quire.models.granite import GraniteConfig, GraniteForCausalLM
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM, LlamaLayer
from quire.models.smollm3 import SmolLM3Attention

ATTENTION = ("attention", "full_attention")
FIELDS_OF_OTHER_LAYERS = (
    "intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "mamba_n_heads",
    "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand", "mamba_chunk_size",
    "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "init_method", "normalization_function", "rope_scaling",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Granite4Config(GraniteConfig):
    """Granite's fields. `rotates`: queries and keys are rotated."""

    rotates: bool

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        """See `LlamaConfig.read`."""
        for name in FIELDS_OF_OTHER_LAYERS:
            reader.raw(name)
        reader.require("mlp_bias", False)
        reader.require("normalization_function", "rmsnorm")
        if reader.optional_integer("num_local_experts", minimum=0) != 0:
            raise UnsupportedModelError(
                f"the model's config has num_local_experts={reader.raw('num_local_experts')!r}; Quire's "
                f"{reader.model_type} computes only 0"
            )
        fields = super().read(reader)
        for name in ("layer_types", "layers_block_type"):
            for layer_type in reader.strings(name, fields["num_layers"]) or ():
                if layer_type not in ATTENTION:
                    raise UnsupportedModelError(f"layer type {layer_type!r} is not supported; supported is attention")
        if not reader.has("layer_types") and not reader.has("layers_block_type"):
            raise UnsupportedModelError("the model's config lacks layer_types, and by default all layers are Mamba")
        return fields | {
            "intermediate_size": reader.integer("shared_intermediate_size", 1024),
            "rotates": reader.choice("position_embedding_type", "nope", ("rope", "nope")) == "rope",
        }


class Granite4MLP(nn.Module):
    """SwiGLU with gates and ups in one projection, F wide on this rank."""

    def __init__(self, config: LlamaConfig, group: Group = SINGLE) -> None:
        super().__init__()
        inner = share("MLP columns", config.intermediate_size, group)
        self.input_linear = ColumnParallelLinear(config.hidden_size, (inner, inner))
        self.output_linear = RowParallelLinear(inner, config.hidden_size, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.output_linear(silu_and_mul(self.input_linear(x)))  # [T, 2F] -> [T, F] -> [T, E]


class Granite4Layer(LlamaLayer):
    """Llama's, with its MLP under another name."""

    def __init__(self, model: LlamaForCausalLM, config: LlamaConfig, layer_index: int) -> None:
        super().__init__(model, config, layer_index)
        self.shared_mlp = self.mlp
        del self.mlp

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.shared_mlp(self.post_attention_layernorm(x))


class Granite4ForCausalLM(GraniteForCausalLM):
    """Granite under other names."""

    Config: ClassVar[type[LlamaConfig]] = Granite4Config
    config: Granite4Config
    attention_class = SmolLM3Attention
    mlp_class = Granite4MLP
    layer_class = Granite4Layer
    stacked_params: ClassVar[Mapping[str, tuple[str, ...]]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def rotations(self, positions: torch.Tensor) -> Sequence[Rotation | None]:
        """See `LlamaForCausalLM.rotations`."""
        return super().rotations(positions) if self.config.rotates else [None] * len(self.layers)


ARCHITECTURES = {"GraniteMoeHybridForCausalLM": Granite4ForCausalLM}
