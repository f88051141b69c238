"""OPT: GPT-2 with norms before or after each block, ReLU, and embeddings of a width of their own.

Next to read: `gpt2.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire import nn
from quire.layers.embedding import Embedding, VocabParallelEmbedding, VocabParallelHead
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group
from quire.layers.linear import Linear
from quire.layers.norms import LayerNorm
from quire.layers.rotary import RopeConfig, Rotation
from quire.lazy_torch import Tensor
from quire.models.gpt2 import PlainMLP
from quire.models.hf_config import HFConfigReader, read_sizes
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM, LlamaLayer
from quire.weight_map import Layout

POSITION_OFFSET = 2
"""The first two rows of the position table are never used."""


@dataclass(frozen=True, kw_only=True)
class OPTConfig(LlamaConfig):
    """Llama's fields. `embedding_size`: width of token embeddings and of the output."""

    embedding_size: int
    activation: str
    norm_before: bool
    final_norm: bool
    norm_affine: bool
    unused = ("init_std",)

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields, bias = read_sizes(reader, ties=True), reader.flag("enable_bias", True)
        norm_before = reader.flag("do_layer_norm_before", True)
        removes_final_norm = reader.flag("_remove_final_layer_norm", False)
        return fields | {
            "intermediate_size": reader.integer("ffn_dim"),
            "embedding_size": reader.integer("word_embed_proj_dim", fields["hidden_size"]),
            "activation": reader.choice("activation_function", "relu", ("relu", "gelu")),
            "norm_before": norm_before,
            "final_norm": norm_before and not removes_final_norm,
            "norm_affine": reader.flag("layer_norm_elementwise_affine", True),
            "rms_norm_epsilon": 1e-5,
            "rope": RopeConfig(),
            "qkv_bias": bias,
            "output_bias": bias,
            "mlp_bias": bias,
        }


class OPTLayer(LlamaLayer):
    """Attention, then MLP, each with a residual and with its norm before the block or after the sum."""

    norm_names = ("self_attn_layer_norm", "final_layer_norm")
    self_attn_layer_norm: nn.Module
    final_layer_norm: nn.Module

    def __init__(self, model: LlamaForCausalLM, config: OPTConfig, layer_index: int) -> None:
        super().__init__(model, config, layer_index)
        self.norm_before = config.norm_before

    def forward(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        if self.norm_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x), rotation, batch)  # [T, E]
            return x + self.mlp(self.final_layer_norm(x))  # [T, E]
        x = self.self_attn_layer_norm(x + self.self_attn(x, rotation, batch))  # [T, E]
        return self.final_layer_norm(x + self.mlp(x))  # [T, E]


class OPTForCausalLM(LlamaForCausalLM):
    """Llama with learned positions, under the checkpoint's names of norms."""

    Config = OPTConfig
    mlp_class = PlainMLP
    layer_class = OPTLayer

    def __init__(self, config: OPTConfig, group: Group = SINGLE) -> None:
        super().__init__(config, group)
        width, size = config.embedding_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, width, group)
        self.embed_positions = Embedding(config.context_len + POSITION_OFFSET, size)
        self.project_in = Linear(width, size) if width != size else None
        self.final_layer_norm = self.norm if config.final_norm else None
        del self.norm
        self.project_out = Linear(size, width) if width != size else None
        self.lm_head = None if config.tie_word_embeddings else VocabParallelHead(config.vocab_size, width, group)

    def layout(self) -> Layout:
        """Return Llama's, under other names."""
        renames = {"out_proj": "o_proj", "fc1": "mlp.c_fc", "fc2": "mlp.c_proj"}
        return Layout(prefixes=("model.decoder.", "decoder."), renames=renames) | super().layout()

    def build_norm(self, config: OPTConfig) -> nn.Module:  # type: ignore[override]
        """Any of the norms over E."""
        return LayerNorm(config.hidden_size, config.rms_norm_epsilon, affine=config.norm_affine)

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm and projection. Shapes: token_ids [T] -> [T, embedding_size]."""
        x = self.embed(token_ids)  # [T, embedding_size]
        if self.project_in is not None:
            x = self.project_in(x)  # [T, E]
        x = x + self.embed_positions(batch.positions + POSITION_OFFSET)  # [T, E]
        for layer in self.layers:
            x = layer(x, None, batch)  # [T, E]
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)  # [T, E]
        return x if self.project_out is None else self.project_out(x)  # [T, embedding_size]


ARCHITECTURES = {"OPTForCausalLM": OPTForCausalLM}
