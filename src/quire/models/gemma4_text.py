"""Gemma 4, its language model: two head sizes, keys shared among layers, inputs of each layer, experts beside MLPs.

Next to read: `hf_gemma4.py` for the fields; `gemma2.py`.
"""

from collections.abc import Sequence
from typing import Any

from quire import nn
from quire.kernels.activations import gelu_tanh
from quire.kernels.elementwise import scale_by
from quire.kernels.experts import SOFTMAX, route
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import rope
from quire.layers.attention import Attention
from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.experts import Experts, Router
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, share_heads
from quire.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from quire.layers.norms import RMSNorm
from quire.layers.rotary import RotaryEmbedding, Rotation
from quire.lazy_torch import Tensor
from quire.models.gemma2 import Gemma2ForCausalLM, Gemma2Layer, Gemma2MLP
from quire.models.hf_gemma4 import Gemma4Config
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import QKV, LlamaForCausalLM
from quire.weight_map import Layout

NORMS_OF_EXPERTS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


def num_projections(config: Gemma4Config, index: int) -> int:
    """1 for queries alone, 2 if keys are the values too, else 3."""
    if config.sources[index] != index:
        return 1
    return 2 if config.shares_values and config.windows[index] is None else 3


class Gemma4Attention(nn.Module):
    """Attention with norms of queries, keys and values, to the layer's own keys and values or an earlier layer's."""

    def __init__(self, config: Gemma4Config, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__()
        heads, kv_heads = share_heads(config.num_heads, config.num_kv_heads, group)
        size, self.epsilon = config.head_size, config.rms_norm_epsilon
        self.parts = (heads, kv_heads, kv_heads)[: num_projections(config, layer_index)]
        self.head_size = size
        widths = [part * size for part in self.parts]
        names = QKV[: len(widths)]
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, widths, bias=config.qkv_bias, stored=names)
        self.o_proj = RowParallelLinear(heads * size, config.hidden_size, group, bias=config.output_bias)
        self.q_norm = RMSNorm(size, self.epsilon)
        self.k_norm = RMSNorm(size, self.epsilon) if len(self.parts) > 1 else None
        self.attention = Attention(
            config.sources[layer_index], size, scale=config.score_scale, window=config.windows[layer_index]
        )

    def forward(self, x: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, D] -> [T, E]."""
        sizes = [part.size for part in self.parts]
        q, *kv = self.qkv_proj(x).view(-1, sum(sizes), self.head_size).split(sizes, dim=1)  # [T, H or K, D]
        q, k, v = rope(self.q_norm(q), *rotation), None, None
        if self.k_norm is not None:
            k, v = rope(self.k_norm(kv[0]), *rotation), rms_norm(kv[-1], None, self.epsilon)
        return self.o_proj(self.attention(q, k, v, batch).flatten(1))  # [T, H, D] -> [T, E]


class Gemma4Router(nn.Module):
    """The weights of each token's experts. Shapes: x [T, E] -> [T, X]; scale [E]; per_expert_scale [X]."""

    def __init__(self, config: Gemma4Config) -> None:
        super().__init__()
        self.scale = nn.Parameter(nn.empty(config.hidden_size))
        self.per_expert_scale = nn.Parameter(nn.empty(config.num_experts))
        self.proj = Router(config.hidden_size, config.num_experts)
        self.epsilon, self.factor, self.top_k = config.rms_norm_epsilon, config.hidden_size**-0.5, config.top_k

    def forward(self, x: Tensor) -> Tensor:
        logits = self.proj(rms_norm(x, self.scale, self.epsilon) * self.factor)  # [T, X]
        return route(logits, self.top_k, True, SOFTMAX, None, self.per_expert_scale)


class Gemma4Layer(Gemma2Layer):
    """Gemma 2's, with experts beside the MLP, an input of the layer's own, and a factor of the result."""

    def __init__(self, model: "Gemma4ForCausalLM", config: Gemma4Config, layer_index: int) -> None:
        super().__init__(model, config.of_layer(layer_index), layer_index)
        width, size = config.hidden_size, config.per_layer_size
        self.router = Gemma4Router(config) if config.num_experts else None
        if config.num_experts:
            self.experts = Experts(width, config.expert_size, config.num_experts, "gelu_tanh", model.group, bias=False)
            for name in NORMS_OF_EXPERTS:
                self.add_module(name, model.build_norm(config))
        self.per_layer_input_gate = Linear(width, size) if size else None
        if size:
            self.per_layer_projection = Linear(size, width)
            self.post_per_layer_input_norm = model.build_norm(config)
        self.layer_scalar = nn.Parameter(nn.empty(1))

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        batch: ForwardBatch,
        per_layer_input: Tensor | None = None,
    ) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, D]; per_layer_input [T, P] or None -> [T, E]."""
        x = super().forward(x, rotation, batch)
        if self.per_layer_input_gate is not None and per_layer_input is not None:
            gated = gelu_tanh(self.per_layer_input_gate(x)) * per_layer_input  # [T, P]
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return scale_by(x, self.layer_scalar)

    def transform(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        if self.router is None:
            return super().transform(x)
        after_mlp, before, after = (self.get_submodule(name) for name in NORMS_OF_EXPERTS)
        dense = after_mlp(self.mlp(self.pre_feedforward_layernorm(x)))
        return self.post_feedforward_layernorm(dense + after(self.experts(before(x), self.router(x))))


class Gemma4ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with other attention, and norms whose weights are stored as they are."""

    Config = Gemma4Config
    attention_class = Gemma4Attention
    mlp_class = Gemma2MLP
    layer_class = Gemma4Layer  # type: ignore[assignment]  # which takes this model's config
    config: Gemma4Config  # type: ignore[assignment]

    def __init__(self, config: Gemma4Config, group: Group = SINGLE) -> None:
        super().__init__(config, group)
        size, num_layers = config.per_layer_size, config.num_layers
        if size:
            self.embed_tokens_per_layer = VocabParallelEmbedding(config.per_layer_vocab, num_layers * size, group)
            self.per_layer_model_projection = Linear(config.hidden_size, num_layers * size)
            self.per_layer_projection_norm = RMSNorm(size, config.rms_norm_epsilon)

    def layout(self) -> Layout:
        """Return Llama's. Checkpoints may have keys and values of layers that attend to others'."""
        unused = "|".join(str(index) for index, source in enumerate(self.config.sources) if index != source)
        return LlamaForCausalLM.layout(self) | Layout(unused=(rf"layers\.({unused})\.self_attn\.[kv]_(proj|norm)\.",))

    def build_rotary(self, config: LlamaConfig) -> nn.Module:
        """See `LlamaForCausalLM.build_rotary`: of layers without a window."""
        return RotaryEmbedding.of(config.rope, self.config.full_head_size)

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm. Shapes: token_ids [T] -> [T, E]."""
        x = self.embed(token_ids)  # [T, E]
        inputs = self.per_layer_inputs(token_ids, x)
        for layer, rotation, own in zip(self.layers, self.rotations(batch.positions), inputs, strict=True):
            x = layer(x, rotation, batch, own)  # [T, E]
        return self.norm(x)  # [T, E]

    def per_layer_inputs(self, token_ids: Tensor, x: Tensor) -> Sequence[Tensor | None]:
        """The input of each layer's own: embeddings of the tokens, and projections of their usual embeddings.

        Shapes: token_ids [T]; x [T, E] -> per layer [T, P] or None.
        """
        size, num_layers = self.config.per_layer_size, self.config.num_layers
        if not size:
            return [None] * num_layers
        projected = self.per_layer_model_projection(x) * self.config.hidden_size**-0.5
        projected = self.per_layer_projection_norm(projected.view(-1, num_layers, size)).flatten(1)  # [T, layers · P]
        embedded = self.embed_tokens_per_layer(token_ids) * size**0.5
        inputs: Any = ((projected + embedded) * 2**-0.5).split([size] * num_layers, dim=1)
        return inputs


ARCHITECTURES = {"Gemma4ForCausalLM": Gemma4ForCausalLM}
