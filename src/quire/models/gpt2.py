"""GPT-2: Llama with learned positions, layer norms, biases, a plain MLP, and no rotation.

Checkpoints store the matrices of all linear layers transposed. Next to read: `llama.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire import nn
from quire.kernels.activations import activate
from quire.layers.embedding import Embedding
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, share
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norms import LayerNorm
from quire.layers.rotary import RopeConfig
from quire.lazy_torch import Tensor
from quire.models.hf_config import ACTIVATIONS, HFConfigReader, read_sizes
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaAttention, LlamaForCausalLM
from quire.weight_map import Layout, Transpose


@dataclass(frozen=True, kw_only=True)
class GPT2Config(LlamaConfig):
    """Llama's fields; `rms_norm_epsilon` is that of the layer norms. `scales`: of each layer's attention scores."""

    activation: str
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
            "rms_norm_epsilon": reader.number("layer_norm_epsilon", 1e-5),
            "scales": tuple(scale / (index + 1) if by_layer else scale for index in range(fields["num_layers"])),
            "rope": RopeConfig(),
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
        }


class GPT2Attention(LlamaAttention):
    """Llama's, with a scale of the layer's own."""

    def __init__(self, config: GPT2Config, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__(config, layer_index, group)
        self.attention.scale = config.scales[layer_index]


class PlainMLP(nn.Module):
    """c_proj(activation(c_fc(x))), F wide on this rank, with the `activation` of the config."""

    def __init__(self, config: Any, group: Group = SINGLE) -> None:
        super().__init__()
        inner = share("MLP columns", config.intermediate_size, group)
        self.activation = config.activation
        self.c_fc = ColumnParallelLinear(config.hidden_size, (inner,), bias=config.mlp_bias)
        self.c_proj = RowParallelLinear(inner, config.hidden_size, group, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.c_proj(activate(self.c_fc(x), self.activation))  # [T, F] -> [T, E]


class GPT2LMHeadModel(LlamaForCausalLM):
    """Llama with learned positions."""

    Config = GPT2Config
    attention_class = GPT2Attention
    mlp_class = PlainMLP
    norm_class = LayerNorm

    def __init__(self, config: LlamaConfig, group: Group = SINGLE) -> None:
        super().__init__(config, group)
        self.embed_positions = Embedding(config.context_len, config.hidden_size)

    def layout(self) -> Layout:
        """Return Llama's, under other names, with queries, keys and values in one piece."""
        return super().layout() | Layout(
            prefixes=("transformer.",),
            renames={
                "wte": "embed_tokens",
                "wpe": "embed_positions",
                "h": "layers",
                "ln_1": "input_layernorm",
                "attn.c_attn": "self_attn.qkv_proj",
                "attn.c_proj": "self_attn.o_proj",
                "ln_2": "post_attention_layernorm",
                "ln_f": "norm",
            },
            views={r"\.(qkv_proj|o_proj|c_fc|c_proj)\.weight$": (Transpose(),)},
            unused=(r"\.attn\.(masked_)?bias$",),
        )

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm. Shapes: token_ids [T] -> [T, E]."""
        x = self.embed(token_ids) + self.embed_positions(batch.positions)  # [T, E]
        for layer in self.layers:
            x = layer(x, None, batch)  # [T, E]
        return self.norm(x)  # [T, E]


ARCHITECTURES = {"GPT2LMHeadModel": GPT2LMHeadModel}
