"""GPT-NeoX and Pythia: rotation of a part of each head, attention and MLP side by side, layer norms, biases.

Next to read: `layers/attention.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from quire import nn
from quire.errors import ModelFileError
from quire.kernels.activations import activate
from quire.kernels.rope import rope
from quire.layers.attention import Attention
from quire.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, share
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norms import LayerNorm
from quire.layers.rotary import RopeConfig, RotaryEmbedding, Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import ACTIVATIONS, HFConfigReader
from quire.models.hf_decoder import DecoderConfig, read_sizes
from quire.models.hf_rope import read_rope
from quire.weight_map import Layout, Rows


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(DecoderConfig):
    """`parallel`: attention and MLP read the same residual."""

    activation: str
    layer_norm_epsilon: float
    rope: RopeConfig
    parallel: bool
    attention_bias: bool
    defaults: ClassVar[Mapping[str, Any]] = {"rotary_pct": 0.25}
    unused = ("classifier_dropout",)

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = read_sizes(reader)
        rope_config = read_rope(reader, theta_name="rotary_emb_base", share_name="rotary_pct", rotates_part=True)
        head_size = fields["head_size"]
        if int(head_size * rope_config.rotated_share) % 2:
            raise ModelFileError(
                f"the model's config has rotary_pct={rope_config.rotated_share}, an odd number of the {head_size} "
                "dimensions of a head: they are rotated in pairs"
            )
        return fields | {
            "intermediate_size": reader.integer("intermediate_size"),
            "activation": ACTIVATIONS[reader.choice("hidden_act", "gelu", tuple(ACTIVATIONS))],
            "layer_norm_epsilon": reader.number("layer_norm_eps", 1e-5),
            "rope": rope_config,
            "parallel": reader.flag("use_parallel_residual", True),
            "attention_bias": reader.flag("attention_bias", True),
        }


class GPTNeoXAttention(nn.Module):
    """Attention with one KV head per query head."""

    def __init__(self, config: GPTNeoXConfig, layer_index: int, group: Group) -> None:
        super().__init__()
        heads = share("attention heads", config.num_heads, group)
        self.num_heads, self.head_size = heads.size, config.head_size
        q = heads * config.head_size
        self.query_key_value = ColumnParallelLinear(config.hidden_size, (q, q, q), bias=config.attention_bias)
        self.dense = RowParallelLinear(q, config.hidden_size, group, bias=config.attention_bias)
        self.attention = Attention(layer_index, config.head_size)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, C] -> [T, E]."""
        qkv = self.query_key_value(x).view(-1, 3 * self.num_heads, self.head_size)  # [T, 3H, D]
        qk, v = qkv.split((2 * self.num_heads, self.num_heads), dim=1)
        q, k = rope(qk, *rotation).split(self.num_heads, dim=1)  # each [T, H, D]
        return self.dense(self.attention(q, k, v, batch).flatten(1))  # [T, E]


class GPTNeoXMLP(nn.Module):
    """dense_4h_to_h(activation(dense_h_to_4h(x)))."""

    def __init__(self, config: GPTNeoXConfig, group: Group) -> None:
        super().__init__()
        inner = share("MLP columns", config.intermediate_size, group)
        self.activation = config.activation
        self.dense_h_to_4h = ColumnParallelLinear(config.hidden_size, (inner,), bias=True)
        self.dense_4h_to_h = RowParallelLinear(inner, config.hidden_size, group, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.dense_4h_to_h(activate(self.dense_h_to_4h(x), self.activation))  # [T, E]


class GPTNeoXLayer(nn.Module):
    """Attention and MLP, each behind a norm: side by side, or one after the other."""

    def __init__(self, config: GPTNeoXConfig, layer_index: int, group: Group) -> None:
        super().__init__()
        self.parallel = config.parallel
        self.input_layernorm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attention = GPTNeoXAttention(config, layer_index, group)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = GPTNeoXMLP(config, group)

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, C] -> [T, E]."""
        attended = self.input_layernorm(x)  # [T, E]
        if self.parallel:
            normed = self.post_attention_layernorm(x)  # [T, E]
            x = x + self.attention(attended, rotation, batch)  # [T, E]
            return x + self.mlp(normed)  # [T, E]
        x = x + self.attention(attended, rotation, batch)  # [T, E]
        return x + self.mlp(self.post_attention_layernorm(x))  # [T, E]


class GPTNeoXForCausalLM(nn.Module):
    """The whole model, or one rank's share. Parameter names are the checkpoint's, without `gpt_neox.`."""

    Config: ClassVar[type[GPTNeoXConfig]] = GPTNeoXConfig

    def __init__(self, config: GPTNeoXConfig, group: Group = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.embed_in = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        self.rotary = RotaryEmbedding(config.rope.frequencies(config.head_size))
        self.layers = nn.ModuleList(GPTNeoXLayer(config, index, group) for index in range(config.num_layers))
        self.final_layer_norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        table_size = config.vocab_size, config.hidden_size
        self.lm_head = None if config.tie_word_embeddings else VocabParallelHead(*table_size, group)

    def layout(self) -> Layout:
        """Return how checkpoints store the parameters."""
        config = self.config  # stored head by head, with query, key and value; here all queries come first
        rows = np.arange(3 * config.hidden_size).reshape(config.num_heads, 3, config.head_size)
        return Layout(
            prefixes=("gpt_neox.",),
            renames={"embed_out": "lm_head"},
            views={r"\.query_key_value\.": (Rows(rows.swapaxes(0, 1).reshape(-1)),)},
            unused=(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
            tied={"lm_head.weight": "embed_in.weight"},
        )

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm. Shapes: token_ids [T] -> [T, E]."""
        x = self.embed_in(token_ids)  # [T, E]
        rotation = self.rotary(batch.positions)  # cos, sin [T, C]
        for layer in self.layers:
            x = layer(x, rotation, batch)  # [T, E]
        return self.final_layer_norm(x)  # [T, E]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, E] -> [S, V]."""
        return self.embed_in.as_head(hidden) if self.lm_head is None else self.lm_head(hidden)


ARCHITECTURES = {"GPTNeoXForCausalLM": GPTNeoXForCausalLM}
