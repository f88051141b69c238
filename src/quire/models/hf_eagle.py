"""`EagleHead`: a layer that was trained to predict a model's tokens, with a directory of its own (EAGLE-3, Li 2025).

It reads three hidden states of the model at a position, joined, and the embedding of the token behind it. It has a head
for the likeliest tokens alone: `d2t` gives the distance of each to the model's id. Embeddings are the model's.
Next to read: `hf_predictor.py` for layers of the model itself; `runtime/head_drafter.py`, which runs both.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire import nn
from quire.kernels.elementwise import join
from quire.layers.embedding import VocabParallelHead
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import share_heads
from quire.layers.linear import ColumnParallelLinear, Linear
from quire.layers.rotary import RotaryEmbedding
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig

if TYPE_CHECKING:
    from quire.models.llama import LlamaForCausalLM

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_KEPT = 3
"""Hidden states that it reads."""


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LlamaConfig):
    """Llama's fields, and the number of tokens of the head."""

    draft_vocab_size: int
    required = {"num_hidden_layers": 1}
    unused = ("eagle_config", "target_hidden_size")

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        return super().read(reader) | {"draft_vocab_size": reader.integer("draft_vocab_size")}

    def behind(self, num_layers: int) -> "EagleConfig":
        """Return the same with the layer behind `num_layers` others."""
        return replace(self, num_layers=num_layers + 1, windows=(None,) * (num_layers + 1))


def kept_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads: low, middle and high."""
    return (2, num_layers // 2, num_layers - 3)


class EagleLayer(nn.Module):
    """Llama's layer, whose attention reads the embedding beside the hidden state, each behind a norm."""

    def __init__(self, model: "LlamaForCausalLM", attention_class: Any, config: EagleConfig, index: int) -> None:
        super().__init__()
        heads, kv_heads = share_heads(config.num_heads, config.num_kv_heads, model.group)
        q, k = heads * config.head_size, kv_heads * config.head_size
        self.input_layernorm = model.build_norm(config)
        self.hidden_norm = model.build_norm(config)
        self.self_attn = attention_class(config, index, model.group)
        self.self_attn.qkv_proj = ColumnParallelLinear(
            2 * config.hidden_size, (q, k, k), bias=config.qkv_bias, stored=("q_proj", "k_proj", "v_proj")
        )
        self.post_attention_layernorm = model.build_norm(config)
        self.mlp = model.mlp_class(config, model.group)

    def forward(self, embedding: Tensor, x: Tensor, rotation: Any, batch: ForwardBatch) -> Tensor:
        """Shapes: embedding, x [T, E]; rotation: cos, sin [T, D] -> [T, E]."""
        joined = join(self.input_layernorm(embedding), self.hidden_norm(x))  # [T, 2E]
        x = x + self.self_attn(joined, rotation, batch)  # [T, E]
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """Names are those of EAGLE-3's directories."""

    def __init__(self, model: "LlamaForCausalLM", attention_class: Any, config: EagleConfig) -> None:
        super().__init__()
        num_layers = model.config.num_layers
        own = config.behind(num_layers)
        self.fc = Linear(NUM_KEPT * model.config.hidden_size, config.hidden_size)
        self.midlayer = EagleLayer(model, attention_class, own, num_layers)
        self.norm = model.build_norm(config)
        self.lm_head = VocabParallelHead(config.draft_vocab_size, config.hidden_size, model.group)
        self.rotary = RotaryEmbedding.of(config.rope, config.head_size)

    def forward(self, embedding: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states, which the next position reads in place of the model's. Shapes: [T, E] each -> [T, E]."""
        found: Tensor = self.midlayer(embedding, hidden, self.rotary(batch.positions), batch)
        return found
