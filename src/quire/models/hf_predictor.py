"""`Predictor`: a layer of the model itself that predicts the token behind the next one (MTP, DeepSeek-V3, sec. 2.2).

It reads the model's hidden state at a position and the embedding of the token behind it. Embeddings and head are the
model's. Of several such layers, each reads the hidden states of the one before it, and predicts a token further ahead.
Next to read: `llama.py`; `runtime/head_drafter.py`, which runs them.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from quire import nn
from quire.kernels.elementwise import join
from quire.layers.forward_batch import ForwardBatch
from quire.layers.linear import Linear
from quire.lazy_torch import Tensor
from quire.models.hf_eagle import EagleConfig, EagleHead
from quire.models.llama import LlamaForCausalLM
from quire.weight_map import Layout


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
