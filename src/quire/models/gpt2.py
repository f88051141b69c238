"""GPT-2: learned positions, layer norms before each block, one projection for queries, keys and values, tied head.

Checkpoints store the matrices of all linear layers transposed. Next to read: `layers/attention.py`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from quire import nn
from quire.kernels.activations import activate
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding, VocabParallelEmbedding, VocabParallelHead
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, share
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norms import LayerNorm
from quire.lazy_torch import Tensor
from quire.models.hf_config import ACTIVATIONS, HFConfigReader
from quire.models.hf_decoder import DecoderConfig, read_sizes
from quire.weight_map import Layout, Transpose


@dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """`scales`: of each layer's attention scores."""

    activation: str
    layer_norm_epsilon: float
    scales: tuple[float, ...]
    unused = (
        "n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn", "summary_type",
        "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    )  # fmt: skip
    """Dropout, classification heads, and an order of operations that fp32 sums do not need."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = read_sizes(reader, hidden="n_embd", layers="n_layer", heads="n_head", context="n_positions", ties=True)
        scale = fields["head_size"] ** -0.5 if reader.flag("scale_attn_weights", True) else 1.0
        by_layer = reader.flag("scale_attn_by_inverse_layer_idx", False)
        return fields | {
            "intermediate_size": reader.integer("n_inner", 4 * fields["hidden_size"]),
            "activation": ACTIVATIONS[reader.choice("activation_function", "gelu_new", tuple(ACTIVATIONS))],
            "layer_norm_epsilon": reader.number("layer_norm_epsilon", 1e-5),
            "scales": tuple(scale / (index + 1) if by_layer else scale for index in range(fields["num_layers"])),
        }


class GPT2Attention(nn.Module):
    """Attention with one KV head per query head, and no rotation."""

    def __init__(self, config: GPT2Config, layer_index: int, group: Group) -> None:
        super().__init__()
        heads = share("attention heads", config.num_heads, group)
        self.num_heads, self.head_size = heads.size, config.head_size
        q = heads * config.head_size
        self.c_attn = ColumnParallelLinear(config.hidden_size, (q, q, q), bias=True)
        self.c_proj = RowParallelLinear(q, config.hidden_size, group, bias=True)
        self.attention = Attention(layer_index, config.head_size, scale=config.scales[layer_index])

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        qkv = self.c_attn(x).view(-1, 3 * self.num_heads, self.head_size)  # [T, 3H, D]
        q, k, v = qkv.split(self.num_heads, dim=1)  # each [T, H, D]
        return self.c_proj(self.attention(q, k, v, batch).flatten(1))  # [T, E]


class GPT2MLP(nn.Module):
    """c_proj(activation(c_fc(x)))."""

    def __init__(self, config: GPT2Config, group: Group) -> None:
        super().__init__()
        inner = share("MLP columns", config.intermediate_size, group)
        self.activation = config.activation
        self.c_fc = ColumnParallelLinear(config.hidden_size, (inner,), bias=True)
        self.c_proj = RowParallelLinear(inner, config.hidden_size, group, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.c_proj(activate(self.c_fc(x), self.activation))  # [T, E]


class GPT2Layer(nn.Module):
    """Attention, then MLP, each behind a norm and beside a residual."""

    def __init__(self, config: GPT2Config, layer_index: int, group: Group) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer_index, group)
        self.ln_2 = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config, group)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        x = x + self.attn(self.ln_1(x), batch)  # [T, E]
        return x + self.mlp(self.ln_2(x))  # [T, E]


class GPT2LMHeadModel(nn.Module):
    """The whole model, or one rank's share. Parameter names are the checkpoint's, without `transformer.`."""

    Config: ClassVar[type[GPT2Config]] = GPT2Config

    def __init__(self, config: GPT2Config, group: Group = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.wte = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        self.wpe = Embedding(config.context_len, config.hidden_size)
        self.h = nn.ModuleList(GPT2Layer(config, index, group) for index in range(config.num_layers))
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        table_size = config.vocab_size, config.hidden_size
        self.lm_head = None if config.tie_word_embeddings else VocabParallelHead(*table_size, group)

    def layout(self) -> Layout:
        """Return how checkpoints store the parameters."""
        return Layout(
            prefixes=("transformer.",),
            views={r"\.c_(attn|proj|fc)\.weight$": (Transpose(),)},
            unused=(r"\.attn\.(masked_)?bias$",),
            tied={"lm_head.weight": "wte.weight"},
        )

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm. Shapes: token_ids [T] -> [T, E]."""
        x = self.wte(token_ids) + self.wpe(batch.positions)  # [T, E]
        for layer in self.h:
            x = layer(x, batch)  # [T, E]
        return self.ln_f(x)  # [T, E]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, E] -> [S, V]."""
        return self.wte.as_head(hidden) if self.lm_head is None else self.lm_head(hidden)


ARCHITECTURES = {"GPT2LMHeadModel": GPT2LMHeadModel}
