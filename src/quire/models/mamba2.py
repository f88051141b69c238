"""Mamba 2: layers with state spaces only, without attention, positions and MLPs.

Next to read: `hf_state_space.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire import nn
from quire.cache_spec import CacheSpec
from quire.layers.forward_batch import ForwardBatch
from quire.layers.rotary import RopeConfig, Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import MAX_LAYERS, HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_state_space import StateSpaceMixer, StateSpaceSizes, read_state_space
from quire.models.llama import LlamaForCausalLM
from quire.weight_map import Layout

STATES = (
    "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "expand", "use_conv_bias", "use_bias",
)  # fmt: skip
CONTEXT_LEN = 2**20
"""Tokens of a context: a state has no limit."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(LlamaConfig):
    """Sizes of the decoder, of which those of attention have no use."""

    state_space: StateSpaceSizes
    defaults = {
        "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
        "n_groups": 8, "state_size": 128, "conv_kernel": 4, "expand": 2,
    }  # fmt: skip
    required = {"rms_norm": True, "hidden_act": "silu"}
    unused = (
        "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank", "time_step_min", "time_step_max",
        "time_step_floor", "time_step_init_scheme", "time_step_scale", "chunk_size", "norm_before_gate",
    )  # fmt: skip
    """Of initialisation, of computing in chunks, and those that Transformers does not read either."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        hidden_size, epsilon = reader.integer("hidden_size"), reader.number("layer_norm_epsilon", 1e-5)
        num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
        sizes = read_state_space(reader, hidden_size, epsilon, STATES)
        return {
            "vocab_size": reader.integer("vocab_size"),
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "intermediate_size": sizes.num_heads * sizes.head_size,
            "num_heads": sizes.num_heads,
            "num_kv_heads": sizes.num_heads,
            "head_size": sizes.head_size,
            "context_len": CONTEXT_LEN,
            "windows": (None,) * num_layers,
            "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
            "rope": RopeConfig(),
            "qkv_bias": False,
            "output_bias": False,
            "mlp_bias": False,
            "recurrent_layers": (True,) * num_layers,
            "rms_norm_epsilon": epsilon,
            "state_space": sizes,
        }

    def state_spec(self) -> CacheSpec:
        return self.state_space.spec()


class Mamba2Layer(nn.Module):
    """A state space behind a norm and beside a residual."""

    def __init__(self, model: LlamaForCausalLM, config: LlamaConfig, layer_index: int) -> None:
        super().__init__()
        self.norm = model.build_norm(config)
        self.mixer = model.build_attention(config, layer_index)

    def forward(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return x + self.mixer(self.norm(x), rotation, batch)


class Mamba2ForCausalLM(LlamaForCausalLM):
    """Llama with state spaces alone."""

    Config = Mamba2Config
    recurrent_class = StateSpaceMixer
    layer_class = Mamba2Layer  # type: ignore[assignment]  # it has no MLP

    def layout(self) -> Layout:
        """Return Llama's, under other names."""
        names = {"embeddings": "embed_tokens", "norm_f": "norm"}
        return super().layout() | Layout(prefixes=("backbone.",), renames=names)

    def rotations(self, positions: Tensor) -> Sequence[None]:
        return [None] * len(self.layers)


ARCHITECTURES = {"Mamba2ForCausalLM": Mamba2ForCausalLM}
