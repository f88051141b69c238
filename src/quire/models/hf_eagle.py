"""`EagleHead`: a layer that was trained to predict a model's tokens, with a directory of its own (EAGLE-3, Li 2025).

It reads three hidden states of the model at a position, joined, and the embedding of the token behind it. It has a head
for the likeliest tokens alone: `d2t` gives the distance of each to the model's id. Embeddings are the model's.
Next to read: `hf_predictor.py` for layers of the model itself; `runtime/head_drafter.py`, which runs both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire import nn
from quire.errors import ModelFileError
from quire.kernels.elementwise import join
from quire.layers.embedding import VocabParallelHead
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import share_heads
from quire.layers.linear import ColumnParallelLinear, Linear
from quire.layers.rotary import RotaryEmbedding
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaAttention, LlamaForCausalLM

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_KEPT = 3
"""Hidden states that it reads."""
_REQUIRED = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "parallel_draft_step": 1,
}  # fmt: skip
"""Fields of `eagle_config` that this head computes with one value only."""


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LlamaConfig):
    """Llama's fields, the number of tokens of the head, and the layers whose outputs it reads; empty for the usual."""

    draft_vocab_size: int
    outputs: tuple[int, ...]
    required = {"num_hidden_layers": 1, "use_sliding_window": False}
    unused = ("target_hidden_size", "max_window_layers")  # its matrices show the first; there is no window

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        own = reader.raw("eagle_config") or {}
        if not isinstance(own, Mapping):
            raise ModelFileError(f"the head's config has eagle_config={str(own)[:60]}, which is not an object")
        outputs = _read_own(HFConfigReader(own))
        return super().read(reader) | {"draft_vocab_size": reader.integer("draft_vocab_size"), "outputs": outputs}

    def behind(self, num_layers: int) -> "EagleConfig":
        """Return the same with the layer behind `num_layers` others."""
        return replace(self, num_layers=num_layers + 1, windows=(None,) * (num_layers + 1))

    def kept_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of the model whose inputs the head reads: low, middle and high. Raises: ModelFileError."""
        if not self.outputs:
            return (2, num_layers // 2, num_layers - 3)
        if self.outputs[-1] > num_layers - 2:
            raise ModelFileError(
                f"the head reads the outputs of layers {list(self.outputs)}, and the model has {num_layers} layers, of"
                f" which 0 to {num_layers - 2} can be read: choose the head that was trained for this model"
            )
        return tuple(index + 1 for index in self.outputs)


def _read_own(reader: HFConfigReader) -> tuple[int, ...]:
    """Read `eagle_config`, which ModelOpt and SpecForge write. Returns: `EagleConfig.outputs`."""
    for name, value in _REQUIRED.items():
        reader.require(name, value)
    for name in ("next_layer_regular", "parallel_draft_heads_num_layers"):
        reader.raw(name)  # of heads that guess several tokens at once
    name = "eagle_aux_hidden_state_layer_ids"
    found = reader.raw(name) or []
    reader.finish()
    are_indices = isinstance(found, list) and all(type(index) is int and index >= 0 for index in found)
    if not are_indices or (found and len(found) != NUM_KEPT) or found != sorted(found):
        raise ModelFileError(
            f"the head's config has {name}={str(found)[:60]}, which is not {NUM_KEPT} ascending layers"
        )
    return tuple(found)


class EagleLayer(nn.Module):
    """Llama's layer, whose attention reads the embedding beside the hidden state, each behind a norm."""

    def __init__(self, model: LlamaForCausalLM, config: EagleConfig, index: int) -> None:
        super().__init__()
        heads, kv_heads = share_heads(config.num_heads, config.num_kv_heads, model.group)
        q, k = heads * config.head_size, kv_heads * config.head_size
        self.input_layernorm = model.build_norm(config)
        self.hidden_norm = model.build_norm(config)
        self.self_attn = LlamaAttention(config, index, model.group)
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

    def __init__(self, model: LlamaForCausalLM, config: EagleConfig) -> None:
        super().__init__()
        num_layers = model.config.num_layers
        own = config.behind(num_layers)
        self.fc = Linear(NUM_KEPT * model.config.hidden_size, config.hidden_size)
        self.midlayer = EagleLayer(model, own, num_layers)
        self.norm = model.build_norm(config)
        self.lm_head = VocabParallelHead(config.draft_vocab_size, config.hidden_size, model.group)
        self.rotary = RotaryEmbedding.of(config.rope, config.head_size)

    def forward(self, embedding: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states, which the next position reads in place of the model's. Shapes: [T, E] each -> [T, E]."""
        found: Tensor = self.midlayer(embedding, hidden, self.rotary(batch.positions), batch)
        return found
