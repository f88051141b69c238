"""OPT: learned positions, layer norms before or after each block, biases, ReLU, embeddings of a width of their own.

Next to read: `layers/attention.py`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from quire import nn
from quire.kernels.activations import activate
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, VocabParallelEmbedding, VocabParallelHead
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, share
from quire.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from quire.layers.norms import LayerNorm
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader
from quire.models.hf_decoder import DecoderConfig, read_sizes
from quire.models.llama import QKV
from quire.weight_map import Layout

POSITION_OFFSET = 2
"""The first two rows of the position table are never used."""
LAYER_NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class OPTConfig(DecoderConfig):
    """`embedding_size`: width of token embeddings and of the output."""

    embedding_size: int
    activation: str
    norm_before: bool
    final_norm: bool
    norm_affine: bool
    bias: bool
    unused = ("init_std",)

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = read_sizes(reader, ties=True)
        norm_before = reader.flag("do_layer_norm_before", True)
        removes_final_norm = reader.flag("_remove_final_layer_norm", False)
        return fields | {
            "intermediate_size": reader.integer("ffn_dim"),
            "embedding_size": reader.integer("word_embed_proj_dim", fields["hidden_size"]),
            "activation": reader.choice("activation_function", "relu", ("relu", "gelu")),
            "norm_before": norm_before,
            "final_norm": norm_before and not removes_final_norm,
            "norm_affine": reader.flag("layer_norm_elementwise_affine", True),
            "bias": reader.flag("enable_bias", True),
        }


class OPTAttention(nn.Module):
    """Attention with one KV head per query head, and no rotation."""

    def __init__(self, config: OPTConfig, layer_index: int, group: Group) -> None:
        super().__init__()
        heads = share("attention heads", config.num_heads, group)
        self.num_heads, self.head_size = heads.size, config.head_size
        q = heads * config.head_size
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, (q, q, q), bias=config.bias, stored=QKV)
        self.out_proj = RowParallelLinear(q, config.hidden_size, group, bias=config.bias)
        self.attention = Attention(layer_index, config.head_size)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        qkv = self.qkv_proj(x).view(-1, 3 * self.num_heads, self.head_size)  # [T, 3H, D]
        q, k, v = qkv.split(self.num_heads, dim=1)  # each [T, H, D]
        return self.out_proj(self.attention(q, k, v, batch).flatten(1))  # [T, E]


class OPTLayer(nn.Module):
    """Attention, then MLP, each with a residual and with its norm before the block or after the sum."""

    def __init__(self, config: OPTConfig, layer_index: int, group: Group) -> None:
        super().__init__()
        inner = share("MLP columns", config.intermediate_size, group)
        self.norm_before = config.norm_before
        self.activation = config.activation
        self.self_attn = OPTAttention(config, layer_index, group)
        self.self_attn_layer_norm = LayerNorm(config.hidden_size, LAYER_NORM_EPSILON, affine=config.norm_affine)
        self.fc1 = ColumnParallelLinear(config.hidden_size, (inner,), bias=config.bias)
        self.fc2 = RowParallelLinear(inner, config.hidden_size, group, bias=config.bias)
        self.final_layer_norm = LayerNorm(config.hidden_size, LAYER_NORM_EPSILON, affine=config.norm_affine)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        if self.norm_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x), batch)  # [T, E]
            return x + self.mlp(self.final_layer_norm(x))  # [T, E]
        x = self.self_attn_layer_norm(x + self.self_attn(x, batch))  # [T, E]
        return self.final_layer_norm(x + self.mlp(x))  # [T, E]

    def mlp(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.fc2(activate(self.fc1(x), self.activation))


class OPTForCausalLM(nn.Module):
    """The whole model, or one rank's share. Parameter names are the checkpoint's, without `model.decoder.`."""

    Config: ClassVar[type[OPTConfig]] = OPTConfig

    def __init__(self, config: OPTConfig, group: Group = SINGLE) -> None:
        super().__init__()
        self.config = config
        narrow = config.embedding_size != config.hidden_size
        table_size = config.vocab_size, config.embedding_size
        self.embed_tokens = VocabParallelEmbedding(*table_size, group)
        self.embed_positions = Embedding(config.context_len + POSITION_OFFSET, config.hidden_size)
        self.project_in = Linear(config.embedding_size, config.hidden_size) if narrow else None
        self.layers = nn.ModuleList(OPTLayer(config, index, group) for index in range(config.num_layers))
        self.final_layer_norm = (
            LayerNorm(config.hidden_size, LAYER_NORM_EPSILON, affine=config.norm_affine) if config.final_norm else None
        )
        self.project_out = Linear(config.hidden_size, config.embedding_size) if narrow else None
        self.lm_head = None if config.tie_word_embeddings else VocabParallelHead(*table_size, group)

    def layout(self) -> Layout:
        """Return how checkpoints store the parameters."""
        return Layout(prefixes=("model.decoder.", "decoder."), tied={"lm_head.weight": "embed_tokens.weight"})

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm and projection. Shapes: token_ids [T] -> [T, embedding_size]."""
        x = self.embed_tokens(token_ids)  # [T, embedding_size]
        if self.project_in is not None:
            x = self.project_in(x)  # [T, E]
        x = x + self.embed_positions(batch.positions + POSITION_OFFSET)  # [T, E]
        for layer in self.layers:
            x = layer(x, batch)  # [T, E]
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)  # [T, E]
        return x if self.project_out is None else self.project_out(x)  # [T, embedding_size]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, embedding_size] -> [S, V]."""
        return self.embed_tokens.as_head(hidden) if self.lm_head is None else self.lm_head(hidden)


ARCHITECTURES = {"OPTForCausalLM": OPTForCausalLM}
