"""GPT-NeoX and Pythia: Llama with layer norms, biases, a plain MLP, and attention and MLP side by side.

Next to read: `llama.py`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.layers.forward_batch import ForwardBatch
from quire.layers.norms import LayerNorm
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.gpt2 import PlainMLP
from quire.models.hf_config import ACTIVATIONS, HFConfigReader, read_sizes
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_rope import check_pairs, read_rope
from quire.models.llama import LlamaForCausalLM, LlamaLayer
from quire.weight_map import Layout, Rows


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(LlamaConfig):
    """Llama's fields; `rms_norm_epsilon` is of layer norms. `parallel`: attention and MLP read the same residual."""

    activation: str
    parallel: bool
    defaults = {"rotary_pct": 0.25}
    unused = ("classifier_dropout",)

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields, bias = read_sizes(reader), reader.flag("attention_bias", True)
        rope_config = read_rope(reader, theta_name="rotary_emb_base", share_name="rotary_pct", rotates_part=True)
        check_pairs(rope_config, fields["head_size"], share_name="rotary_pct")
        return fields | {
            "intermediate_size": reader.integer("intermediate_size"),
            "activation": ACTIVATIONS[reader.choice("hidden_act", "gelu", tuple(ACTIVATIONS))],
            "rms_norm_epsilon": reader.number("layer_norm_eps", 1e-5),
            "rope": rope_config,
            "parallel": reader.flag("use_parallel_residual", True),
            "qkv_bias": bias,
            "output_bias": bias,
            "mlp_bias": True,
        }


class GPTNeoXLayer(LlamaLayer):
    """Attention and MLP, each behind a norm: side by side, or one after the other."""

    def __init__(self, model: LlamaForCausalLM, config: GPTNeoXConfig, layer_index: int) -> None:
        super().__init__(model, config, layer_index)
        self.parallel = config.parallel

    def forward(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, C] -> [T, E]."""
        if not self.parallel:
            return super().forward(x, rotation, batch)
        attended, normed = self.input_layernorm(x), self.post_attention_layernorm(x)  # [T, E] each
        x = x + self.self_attn(attended, rotation, batch)  # [T, E]
        return x + self.mlp(normed)  # [T, E]


class GPTNeoXForCausalLM(LlamaForCausalLM):
    """Llama with other layers."""

    Config = GPTNeoXConfig
    mlp_class = PlainMLP
    layer_class = GPTNeoXLayer
    norm_class = LayerNorm

    def layout(self) -> Layout:
        """Return Llama's, under other names, with query, key and value of each head after another."""
        config = self.config  # here all queries come first
        rows = np.arange(3 * config.hidden_size).reshape(config.num_heads, 3, config.head_size)
        return super().layout() | Layout(
            prefixes=("gpt_neox.",),
            renames={
                "embed_in": "embed_tokens",
                "embed_out": "lm_head",
                "final_layer_norm": "norm",
                "attention.query_key_value": "self_attn.qkv_proj",
                "attention.dense": "self_attn.o_proj",
                "dense_h_to_4h": "c_fc",
                "dense_4h_to_h": "c_proj",
            },
            views={r"\.qkv_proj\.": (Rows(rows.swapaxes(0, 1).reshape(-1)),)},
            unused=(r"attention\.(bias|masked_bias)$",),
        )


ARCHITECTURES = {"GPTNeoXForCausalLM": GPTNeoXForCausalLM}
