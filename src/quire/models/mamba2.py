"""Mamba 2: layers with state spaces only, without attention, positions and MLPs.

Next to read: `hf_state_space.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire import nn
from quire.cache_spec import CacheSpec
from quire.errors import ModelFileError
from quire.kernels.recurrence import MAX_TAPS
from quire.layers.forward_batch import ForwardBatch
from quire.layers.rotary import RopeConfig, Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import MAX_LAYERS, HFConfigReader, check_divides
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_state_space import StateSpaceMixer, StateSpaceSizes, check_time_steps
from quire.models.llama import LlamaForCausalLM
from quire.weight_map import Layout

CONTEXT_LEN = 2**20
"""Tokens of a context: a state has no limit."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(LlamaConfig):
    """Sizes of the decoder, of which those of attention have no use."""

    state_space: StateSpaceSizes
    required = {"rms_norm": True, "hidden_act": "silu"}
    unused = (
        "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank", "time_step_min", "time_step_max",
        "time_step_floor", "time_step_init_scheme", "time_step_scale", "chunk_size", "norm_before_gate",
    )  # fmt: skip
    """Of initialisation, of computing in chunks, and those that Transformers does not read either."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        check_time_steps(reader)
        hidden_size, num_heads = reader.integer("hidden_size", 4096), reader.integer("num_heads", 128)
        head_size, expand = reader.integer("head_dim", 64), reader.integer("expand", 2)
        num_layers = reader.integer("num_hidden_layers", 64, maximum=MAX_LAYERS)
        if num_heads * head_size != expand * hidden_size:
            raise ModelFileError(
                f"the model's config has num_heads={num_heads} of head_dim={head_size}, which is not expand={expand} "
                f"times hidden_size={hidden_size}"
            )
        num_groups, num_taps = reader.integer("n_groups", 8), reader.integer("conv_kernel", 4, maximum=MAX_TAPS)
        epsilon = reader.number("layer_norm_epsilon", 1e-5)
        check_divides("n_groups", num_groups, "num_heads", num_heads)
        return {
            "vocab_size": reader.integer("vocab_size", 32768), "hidden_size": hidden_size, "num_layers": num_layers,
            "intermediate_size": expand * hidden_size, "num_heads": num_heads, "num_kv_heads": num_heads,
            "head_size": head_size, "context_len": CONTEXT_LEN, "windows": (None,) * num_layers,
            "tie_word_embeddings": reader.flag("tie_word_embeddings", False), "rope": RopeConfig(),
            "qkv_bias": False, "output_bias": False, "mlp_bias": False, "recurrent_layers": (True,) * num_layers,
            "rms_norm_epsilon": epsilon,
            "state_space": StateSpaceSizes(
                hidden_size=hidden_size, num_heads=num_heads, head_size=head_size, num_groups=num_groups,
                state_size=reader.integer("state_size", 128), num_taps=num_taps, bias=reader.flag("use_bias", False),
                conv_bias=reader.flag("use_conv_bias", True), epsilon=epsilon,
            ),
        }  # fmt: skip

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
