"""`Predictor`: a layer of the model itself that predicts the token behind the next one (MTP, DeepSeek-V3, sec. 2.2).

It reads the model's hidden state at a position and the embedding of the token behind it. Embeddings and head are the
model's. Next to read: `llama.py`; `runtime/head_drafter.py`, which runs it.
"""

from typing import TYPE_CHECKING, Any

from quire import nn
from quire.kernels.elementwise import join
from quire.layers.forward_batch import ForwardBatch
from quire.layers.linear import Linear
from quire.lazy_torch import Tensor
from quire.models.hf_eagle import EagleConfig, EagleHead, kept_layers

if TYPE_CHECKING:
    from quire.models.llama import LlamaForCausalLM


class Predictor(nn.Module):
    """norm(layer(fc[norm(embedding of the next token); norm(hidden)])). Its layer has the index behind the model's.

    Names are those of Qwen3-Next's checkpoints.
    """

    def __init__(self, model: "LlamaForCausalLM") -> None:
        super().__init__()
        config: Any = model.config.with_layer()
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


def add_predictor(model: "LlamaForCausalLM") -> None:
    """Add a model's layer that predicts further tokens; it is not loaded otherwise. Mutates: model."""
    model.mtp = Predictor(model)


def add_eagle(model: "LlamaForCausalLM", config: EagleConfig) -> None:
    """Add an EAGLE head, whose directory has this config. Mutates: model."""
    from quire.models.llama import LlamaAttention  # it imports this file

    model.eagle = EagleHead(model, LlamaAttention, config)
    model.kept_layers = kept_layers(model.config.num_layers)


def predict(model: "LlamaForCausalLM", token_ids: Tensor, batch: ForwardBatch, hidden: Tensor) -> Tensor:
    """Compute the predictor's hidden states, which it can read as `hidden` of the next position.

    Shapes: token_ids [T], each behind its position; hidden [T, E] -> [T, E].
    """
    embedding = model.embed(token_ids)
    if model.eagle is not None:
        return model.eagle(embedding, hidden, batch)
    assert model.mtp is not None
    found = model.mtp(embedding, hidden, model.rotary(batch.positions), batch)
    return model.mtp.norm(found) if model.predictor_keeps_norm else found


def predicted_logits(model: "LlamaForCausalLM", hidden: Tensor) -> Tensor:
    """Score hidden states of `predict`. Shapes: hidden [S, E] -> [S, V], or [S, tokens of an EAGLE head]."""
    if model.eagle is not None:
        return model.eagle.lm_head(model.eagle.norm(hidden))
    assert model.mtp is not None
    return model.compute_logits(hidden if model.predictor_keeps_norm else model.mtp.norm(hidden))
