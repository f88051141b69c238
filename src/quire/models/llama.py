"""Llama 1, 2, 3 and models of its shape (SmolLM2, TinyLlama): RMS norm, rotary attention, grouped KV heads, SwiGLU.

To vary it, subclass `LlamaForCausalLM` and set `Config` or one of the classes `attention_class`, `mlp_class`,
`moe_class`, `layer_class` and `norm_class`, or override a `build_…` method, `embed`, `rotations` or `compute_logits`;
all other models here do just that. Next to read: `layers/attention.py`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from quire import nn
from quire.kernels.activations import silu_and_mul
from quire.kernels.rope import rope
from quire.kernels.tracing import Symbol
from quire.layers.attention import Attention
from quire.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group, share, share_heads
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.norms import RMSNorm
from quire.layers.rotary import RotaryEmbedding, Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import MoE
from quire.weight_map import Layout

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Stored names of the parts of merged projections."""


class LlamaAttention(nn.Module):
    """Project to queries, keys and values, rotate, attend, project back. H and K are the heads of this rank."""

    sinks: Tensor | None = None
    """Scores [H] that take part in the softmax and have no value; None for none."""

    def __init__(self, config: LlamaConfig, layer_index: int, group: Group = SINGLE) -> None:
        super().__init__()
        heads, kv_heads = share_heads(config.num_heads, config.num_kv_heads, group)
        self.num_heads, self.num_kv_heads, self.head_size = heads.size, kv_heads.size, config.head_size
        q, k = heads * config.head_size, kv_heads * config.head_size
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, (q, k, k), bias=config.qkv_bias, stored=QKV)
        self.o_proj = RowParallelLinear(q, config.hidden_size, group, bias=config.output_bias)
        self.attention = Attention(
            layer_index,
            self.head_size,
            scale=config.score_scale,
            window=config.windows[layer_index],
            soft_cap=config.score_cap,
        )

    def forward(self, x: Tensor, rotation: Any, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, D], or None for none -> [T, E]."""
        qkv = self.qkv_proj(x).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_size)  # [T, H + 2K, D]
        qk, v = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)  # [T, H + K, D], [T, K, D]
        q, k = self.rotate(qk, rotation)  # [T, H, D], [T, K, D]
        return self.o_proj(self.attention(q, k, v, batch, self.sinks).flatten(1))  # [T, H, D] -> [T, E]

    def rotate(self, qk: Tensor, rotation: Any) -> tuple[Tensor, Tensor]:
        """Queries and keys as attention needs them. Shapes: qk [T, H + K, D] -> [T, H, D], [T, K, D]."""
        rotated = qk if rotation is None else rope(qk, *rotation)
        q, k = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        return q, k


class LlamaMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), F wide on this rank. A subclass may set another `activation`."""

    activation = staticmethod(silu_and_mul)

    def __init__(self, config: LlamaConfig, group: Group = SINGLE) -> None:
        super().__init__()
        inner = share("MLP columns", config.intermediate_size, group)
        self.gate_up_proj = ColumnParallelLinear(
            config.hidden_size, (inner, inner), bias=config.mlp_bias, stored=GATE_UP
        )
        self.down_proj = RowParallelLinear(inner, config.hidden_size, group, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, E] -> [T, E]."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))  # [T, 2F] -> [T, F] -> [T, E]


class LlamaLayer(nn.Module):
    """Attention, then MLP, each behind a norm and beside a residual.

    A subclass may set other `norm_names`, the checkpoint's, and say by `attend` and `transform` where they apply.
    """

    norm_names: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    self_attn: nn.Module

    def __init__(self, model: "LlamaForCausalLM", config: LlamaConfig, layer_index: int) -> None:
        super().__init__()
        half = len(self.norm_names) // 2  # in the order of computation, which lists of weights show
        for name in self.norm_names[:half]:
            self.add_module(name, model.build_norm(config))
        mixer = model.build_attention(config, layer_index)
        self.mixer_name: str = getattr(mixer, "name_in_layer", "self_attn")
        self.add_module(self.mixer_name, mixer)
        for name in self.norm_names[half:]:
            self.add_module(name, model.build_norm(config))
        self.mlp = model.build_mlp(config, layer_index)

    def forward(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, D] -> [T, E]."""
        x = x + self.attend(x, rotation, batch)  # [T, E]
        return x + self.transform(x)  # [T, E]

    def attend(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Attention and its norms. Shapes: x [T, E]; rotation: cos, sin [T, D] -> [T, E]."""
        return self.get_submodule(self.mixer_name)(self.input_layernorm(x), rotation, batch)

    def transform(self, x: Tensor) -> Tensor:
        """The MLP and its norms. Shapes: x [T, E] -> [T, E]."""
        return self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(nn.Module):
    """The whole model, or one rank's share. Parameter names: the checkpoint's without `model.`, projections merged."""

    Config: ClassVar[type[LlamaConfig]] = LlamaConfig
    attention_class: ClassVar[type[nn.Module]] = LlamaAttention
    recurrent_class: ClassVar[type[nn.Module]] = nn.Module
    mlp_class: ClassVar[type[nn.Module]] = LlamaMLP
    moe_class: ClassVar[type[nn.Module]] = MoE
    layer_class: ClassVar[type[LlamaLayer]] = LlamaLayer
    norm_class: ClassVar[type[nn.Module]] = RMSNorm
    predictor_keeps_norm: ClassVar[bool] = False
    mtp: Any = None  # `hf_predictor.py` adds these two
    eagle: Any = None

    def __init__(self, config: LlamaConfig, group: Group = SINGLE) -> None:
        super().__init__()
        self.config, self.group = config, group
        table_size = config.vocab_size, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(*table_size, group)
        self.rotary = self.build_rotary(config)
        local = config.local_rope
        self.local_rotary = None if local is None else RotaryEmbedding.of(local, config.head_size)
        self.layers = nn.ModuleList(self.layer_class(self, config, index) for index in range(config.num_layers))
        self.norm = self.build_norm(config)
        self.lm_head = None if config.tie_word_embeddings else VocabParallelHead(*table_size, group)
        self.kept_layers: tuple[int, ...] = ()
        self.kept: list[Symbol] = []

    def layout(self) -> Layout:
        """Return how checkpoints store the parameters. A subclass adds what differs: `super().layout() | Layout(…)`."""
        layout = Layout(
            prefixes=("model.",),
            unused=(r"rotary_emb\.inv_freq$", r"^eagle\.(d2t|t2d|embed_tokens\.weight)$"),
            tied={"lm_head.weight": "embed_tokens.weight"},
        )
        if not self.config.num_predictors:
            return layout
        return layout | (self.config.unused_behind() if self.mtp is None else self.mtp.layout())

    def build_rotary(self, config: LlamaConfig) -> nn.Module:
        """Positions [T] to the `rotation` that attention gets."""
        return RotaryEmbedding.of(config.rope, config.head_size)

    def build_attention(self, config: LlamaConfig, layer_index: int) -> nn.Module:
        """The attention of a layer, or what it has instead: recurrent state, by the checkpoint's `name_in_layer`."""
        kind = self.recurrent_class if config.is_recurrent(layer_index) else self.attention_class
        return kind(config, layer_index, self.group)

    def build_mlp(self, config: LlamaConfig, layer_index: int) -> nn.Module:
        """The MLP of one layer, or its experts."""
        has_experts = bool(config.sparse_layers) and config.sparse_layers[layer_index]
        return (self.moe_class if has_experts else self.mlp_class)(config, self.group)

    def build_norm(self, config: LlamaConfig) -> nn.Module:
        """Any of the norms over E."""
        return self.norm_class(config.hidden_size, config.rms_norm_epsilon)

    def forward(self, token_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last norm. Shapes: token_ids [T] -> [T, E]."""
        x = self.embed(token_ids)  # [T, E]
        for index, (layer, rotation) in enumerate(zip(self.layers, self.rotations(batch.positions), strict=True)):
            if index in self.kept_layers and isinstance(x, Symbol):
                self.kept += [x.trace.record("keep", (x,), x.sizes)] * self.kept_layers.count(index)
            x = layer(x, rotation, batch)  # [T, E]
        return self.norm(x)  # [T, E]

    def embed(self, token_ids: Tensor) -> Tensor:
        """The layers' input. Shapes: token_ids [T] -> [T, E]."""
        return self.embed_tokens(token_ids)

    def rotations(self, positions: Tensor) -> Sequence[Rotation | None]:
        """The rotation of each layer, None for none. Shapes: positions [T] -> per layer cos, sin [T, D]."""
        if self.local_rotary is None:
            return [self.rotary(positions)] * len(self.layers)
        local, full = self.local_rotary(positions), self.rotary(positions)
        return [full if window is None else local for window in self.config.windows]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [S, E] -> [S, V]."""
        return self.embed_tokens.as_head(hidden) if self.lm_head is None else self.lm_head(hidden)


ARCHITECTURES = {"LlamaForCausalLM": LlamaForCausalLM}
