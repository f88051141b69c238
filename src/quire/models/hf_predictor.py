"""Layers that predict the token behind the next one: `Predictor`, of the model itself (MTP, DeepSeek-V3, sec. 2.2), and
`EagleHead`, trained for a model and with a directory of its own (EAGLE-3, Li 2025).

Next to read: `llama.py`; `runtime/head_drafter.py`, which runs them.
"""

from collections.abc import Collection, Mapping
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
from quire.weight_map import Layout

# --- A head with a directory of its own -----------------------------------------------------------
# It reads three hidden states of the model at a position, joined, and the embedding of the token behind it. It has a
# head for the likeliest tokens alone: `d2t` gives the distance of each to the model's id. Embeddings are the model's.

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


# --- Layers of the model itself -------------------------------------------------------------------
# A layer reads the model's hidden state at a position and the embedding of the token behind it. Embeddings and head are
# the model's. Of several such layers, each reads the hidden states of the one before it, and predicts a token further
# ahead.


class Predictor(nn.Module):
    """norm(layer(fc[norm(embedding of a token ahead); norm(hidden)])). Its layer has an index behind the model's.

    Names are those of Qwen3-Next's checkpoints. `index`: of several ones.
    """

    def __init__(self, model: LlamaForCausalLM, index: int) -> None:
        super().__init__()
        config: Any = model.config.with_layers(index + 1)
        self.pre_fc_norm_embedding = model.build_norm(config)
        self.pre_fc_norm_hidden = model.build_norm(config)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([model.layer_class(model, config, config.num_layers - 1)])
        self.norm = model.build_norm(config)

    def forward(self, embedding: Tensor, hidden: Tensor, rotation: Any, batch: ForwardBatch) -> Tensor:
        """Values before the last norm. Shapes: embedding, hidden [T, E]; rotation: cos, sin [T, D] -> [T, E]."""
        joined = join(self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden))  # [T, 2E]
        found: Tensor = self.layers[0](self.fc(joined), rotation, batch)
        return found


class Predictors(nn.ModuleList):
    """The layers of a model that predict further tokens."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._first, self._behind = model.config.num_layers, model.config.names_behind
        super().__init__(Predictor(model, index) for index in range(model.config.num_predictors))

    def layout(self) -> Layout:
        """Return how checkpoints store them: as Qwen's, or as DeepSeek's and GGUF files behind the model's layers.

        These have copies of the model's embeddings and head, too.
        """
        renames = {"mtp": "mtp.0"}  # before the others, which lead there
        for index in range(len(self)):
            at, own = f"layers.{self._first + index}", f"mtp.{index}"
            renames |= {
                f"{at}.enorm": f"{own}.pre_fc_norm_embedding",
                f"{at}.hnorm": f"{own}.pre_fc_norm_hidden",
                f"{at}.eh_proj": f"{own}.fc",
                f"{at}.shared_head.norm": f"{own}.norm",
                at: f"{own}.layers.0",
            }
        return Layout(renames=renames, unused=(rf"{self._behind}(embed_tokens|shared_head\.head)\.",))


def add_predictors(model: LlamaForCausalLM) -> None:
    """Add a model's layers that predict further tokens; they are not loaded otherwise. Mutates: model."""
    model.mtp = Predictors(model)


def with_stored_predictors(model: LlamaForCausalLM, names: Collection[str]) -> None:
    """Add those of these layers that a checkpoint with tensors of these names has. Mutates: model."""
    first, count = model.config.num_layers, model.config.num_predictors
    stored = [f"layers.{first + index}.eh_proj.weight" for index in range(count)]
    found = [name for name in names if name.endswith((*stored, "mtp.fc.weight"))]
    model.config = replace(model.config, num_predictors=len(found))
    if found:
        add_predictors(model)


def add_eagle(model: LlamaForCausalLM, config: EagleConfig) -> None:
    """Add an EAGLE head, whose directory has this config. Mutates: model. Raises: ModelFileError."""
    model.eagle = EagleHead(model, config)
    model.kept_layers = config.kept_layers(model.config.num_layers)


def predict(model: LlamaForCausalLM, index: int, token_ids: Tensor, batch: ForwardBatch, hidden: Tensor) -> Tensor:
    """Compute hidden states of the predictor `index`, which it can read as `hidden` of the next position.

    Shapes: token_ids [T], each ahead of its position; hidden [T, E] -> [T, E].
    """
    embedding = model.embed(token_ids)
    if model.eagle is not None:
        return model.eagle(embedding, hidden, batch)
    predictor = model.mtp[index]
    found = predictor(embedding, hidden, model.rotary(batch.positions), batch)
    return predictor.norm(found) if model.predictor_keeps_norm else found


def predicted_logits(model: LlamaForCausalLM, index: int, hidden: Tensor) -> Tensor:
    """Score hidden states of `predict`. Shapes: hidden [S, E] -> [S, V], or [S, tokens of an EAGLE head]."""
    if model.eagle is not None:
        return model.eagle.lm_head(model.eagle.norm(hidden))
    return model.compute_logits(hidden if model.predictor_keeps_norm else model.mtp[index].norm(hidden))
