"""Mamba 2: layers with state spaces only, without attention, positions and MLPs.

Next to read: `hf_state_space.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire import nn
from quire.cache_spec import CacheSpec
from quire.errors import ModelFileError
from quire.kernels.recurrence import MAX_TAPS
from quire.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group
from quire.layers.norms import RMSNorm
from quire.lazy_torch import Tensor
from quire.models.hf_config import MAX_LAYERS, HFConfigReader, check_divides
from quire.models.hf_decoder import DecoderConfig
from quire.models.hf_state_space import StateSpaceMixer, StateSpaceSizes, check_time_steps
from quire.weight_map import Layout

CONTEXT_LEN = 2**20
"""Tokens of a context: a state has no limit."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(DecoderConfig):
    """Sizes of the decoder, of which those of attention have no use."""

    state_space: StateSpaceSizes
    required: ClassVar[Mapping[str, Any]] = {"rms_norm": True, "hidden_act": "silu"}
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
        check_divides("n_groups", num_groups, "num_heads", num_heads)
        return {
            "vocab_size": reader.integer("vocab_size", 32768), "hidden_size": hidden_size, "num_layers": num_layers,
            "intermediate_size": expand * hidden_size, "num_heads": num_heads, "num_kv_heads": num_heads,
            "head_size": head_size, "context_len": CONTEXT_LEN, "windows": (None,) * num_layers,
            "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
            "state_space": StateSpaceSizes(
                hidden_size=hidden_size, num_heads=num_heads, head_size=head_size, num_groups=num_groups,
                state_size=reader.integer("state_size", 128), num_taps=num_taps, bias=reader.flag("use_bias", False),
                conv_bias=reader.flag("use_conv_bias", True), epsilon=reader.number("layer_norm_epsilon", 1e-5),
            ),
        }  # fmt: skip

    def kv_specs(self) -> list[CacheSpec]:
        """See `DecoderConfig.kv_specs`."""
        return [self.state_space.spec()] * self.num_layers


class Mamba2Layer(nn.Module):
    """A state space behind a norm and beside a residual."""

    def __init__(self, config: Mamba2Config, layer_index: int, group: Group) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.state_space.epsilon)
        self.mixer = StateSpaceMixer(config.state_space, layer_index, group)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return x + self.mixer(self.norm(x), batch)


class Mamba2ForCausalLM(nn.Module):
    """The whole model, or one rank's share. Parameter names are the checkpoint's, without `backbone.`."""

    Config: ClassVar[type[Mamba2Config]] = Mamba2Config

    def __init__(self, config: Mamba2Config, group: Group = SINGLE) -> None:
        super().__init__()
        self.config = config
        table_size = config.vocab_size, config.hidden_size
        self.embeddings = VocabParallelEmbedding(*table_size, group)
        self.layers = nn.ModuleList(Mamba2Layer(config, index, group) for index in range(config.num_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.state_space.epsilon)
        self.lm_head = None if config.tie_word_embeddings else VocabParallelHead(*table_size, group)

    def layout(self) -> Layout:
        """Return how checkpoints store the parameters."""
        return Layout(prefixes=("backbone.",), tied={"lm_head.weight": "embeddings.weight"})

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm. Shapes: token_ids [T] -> [T, E]."""
        x = self.embeddings(token_ids)  # [T, E]
        for layer in self.layers:
            x = layer(x, batch)  # [T, E]
        return self.norm_f(x)  # [T, E]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, E] -> [S, V]."""
        return self.embeddings.as_head(hidden) if self.lm_head is None else self.lm_head(hidden)


ARCHITECTURES = {"Mamba2ForCausalLM": Mamba2ForCausalLM}
