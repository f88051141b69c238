"""Granite 4: Granite 3 with or without positions, with state spaces instead of attention, and experts beside the MLP.

Next to read: `granite.py`; `hf_state_space.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.cache_spec import CacheSpec
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.deepseek_v2 import SharedMoE
from quire.models.granite import GraniteConfig, GraniteForCausalLM
from quire.models.hf_config import HFConfigReader, read_recurrent_layers, wrong
from quire.models.hf_moe import TRAINING_FIELDS, most_experts
from quire.models.hf_state_space import StateSpaceMixer, StateSpaceSizes, read_state_space
from quire.weight_map import Layout

STATES = (
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_expand",
    "mamba_conv_bias", "mamba_proj_bias",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Granite4Config(GraniteConfig):
    """Granite's fields. `rotates`: queries and keys are rotated. `num_experts`: 0 for an MLP alone."""

    rotates: bool
    state_space: StateSpaceSizes
    required = {"mlp_bias": False, "normalization_function": "rmsnorm"}
    defaults = {
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    }  # fmt: skip
    unused = (*TRAINING_FIELDS, "mamba_chunk_size", "init_method", "rope_scaling")

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields, shared_size = super().read(reader), reader.integer("shared_intermediate_size", 1024)
        num_experts = reader.integer("num_local_experts", 8, minimum=0, maximum=most_experts(fields))
        top_k = reader.integer("num_experts_per_tok", 2, minimum=0)
        if num_experts and not 1 <= top_k <= num_experts:
            raise wrong("num_experts_per_tok", top_k, f"from 1 to num_local_experts={num_experts}: correct it there")
        recurrent = read_recurrent_layers(reader, fields["num_layers"], lambda index: True, "layers_block_type")
        experts: dict[str, Any] = {}
        if num_experts:
            experts = {
                "num_experts": num_experts,
                "top_k": top_k,
                "expert_size": fields["intermediate_size"],
                "shared_size": shared_size,
                "sparse_layers": (True,) * fields["num_layers"],
            }
        return (
            fields
            | experts
            | {
                "intermediate_size": shared_size,
                "rotates": reader.choice("position_embedding_type", "nope", ("rope", "nope")) == "rope",
                "recurrent_layers": recurrent if any(recurrent) else (),
                "state_space": read_state_space(reader, fields["hidden_size"], fields["rms_norm_epsilon"], STATES),
            }
        )

    def state_spec(self) -> CacheSpec:
        return self.state_space.spec()


class Granite4ForCausalLM(GraniteForCausalLM):
    """Granite under other names, with state spaces and experts."""

    Config = Granite4Config
    config: Granite4Config
    recurrent_class = StateSpaceMixer
    moe_class = SharedMoE

    def layout(self) -> Layout:
        """Return Llama's, under other names. Gates and ups of the MLP are stored in one piece."""
        return super().layout() | Layout(
            renames={
                "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
                "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
                "block_sparse_moe": "mlp",
                "router.layer": "router",
                "router": "gate",
                "shared_mlp": "mlp.shared_experts" if self.config.num_experts else "mlp",
                "input_linear": "gate_up_proj",
                "output_linear": "down_proj",
            }
        )

    def rotations(self, positions: Tensor) -> Sequence[Rotation | None]:
        return super().rotations(positions) if self.config.rotates else [None] * len(self.layers)


ARCHITECTURES = {"GraniteMoeHybridForCausalLM": Granite4ForCausalLM}
