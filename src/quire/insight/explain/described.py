"""DeepSeek-V3 as a list of products: an architecture that Quire can explain and has no model class for.

It has the instructions and the cache that such a class would have: latent attention (MLA) and routed experts, of which
a step reads only those it uses. The multi-token-prediction layer is left out. To be deleted with the class.
Source: DeepSeek-V2 (arXiv 2405.04434) sec. 2.1 for MLA, DeepSeek-V3 (arXiv 2412.19437) for the sizes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quire._native import WeightFormat
from quire.cache_spec import LatentKV
from quire.config import DTYPES, EngineConfig, ModelConfig
from quire.insight.explain.rank_model import RankModel, weigh
from quire.kernels.collective import AllGather, AllReduce
from quire.kernels.embedding import Embed
from quire.kernels.experts import ExpertGemm, Route
from quire.kernels.instruction import (
    KV_ARITHMETIC,
    KV_BYTES,
    Buffer,
    Columns,
    Cost,
    Instruction,
    StepShape,
)
from quire.kernels.linear import Gemm
from quire.kernels.rms_norm import Norm
from quire.layers.group import LocalGroup, UnevenSplitError, share, share_vocabulary
from quire.models.hf_config import HFConfigReader
from quire.runtime.plan.packed_weights import BY_DTYPE

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "first_k_dense_replace", "vocab_size", "max_position_embeddings",
)  # fmt: skip


@dataclass(eq=False, frozen=True, slots=True)
class LatentAttend(Instruction):
    """Attention of `num_heads` heads to one latent of `rank` values and a rotary part per position."""

    num_heads: int
    rank: int
    rotary_size: int
    nope_size: int
    value_size: int

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`. A prompt from its start multiplies expanded keys and values; later tokens multiply the
        latent itself, with the expansion absorbed in queries and outputs (sec. 2.1.2)."""
        flops = 0
        for start, count in step.requests:
            scores = StepShape(((start, count),)).num_scores(0)
            expanded = self.nope_size + self.rotary_size + self.value_size
            flops += 2 * scores * self.num_heads * (2 * self.rank + self.rotary_size if start else expanded)
        return Cost(flops, step.num_positions(0) * self.position_bytes(step), 0, KV_ARITHMETIC[step.kv_format])

    def position_bytes(self, step: StepShape) -> int:
        """Bytes of one position."""
        return (self.rank + self.rotary_size) * KV_BYTES[step.kv_format]


class WriteLatent(LatentAttend):
    """The latents of the new tokens, to the cache."""

    __slots__ = ()

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`."""
        return Cost(bytes_written=step.num_tokens * self.position_bytes(step))


def describe(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Return the facts of a model. Raises: ModelFileError for a field that is missing or wrong."""
    size = read_sizes(hf_config)
    spec = LatentKV(size["kv_lora_rank"], size["qk_rope_head_dim"], 1)
    model = ModelConfig(
        architecture=ARCHITECTURES[0], hf_config=dict(hf_config), vocab_size=size["vocab_size"],
        hidden_size=size["hidden_size"], num_layers=size["num_hidden_layers"], num_heads=size["num_attention_heads"],
        num_kv_heads=1, head_size=size["v_head_dim"], context_len=size["max_position_embeddings"], num_parameters=0,
        cache_specs=(spec,) * size["num_hidden_layers"],
    )  # fmt: skip
    shapes = _Builder(size, 1, WeightFormat.bf16, 2).build().shapes.values()
    return replace(model, num_parameters=sum(math.prod(whole) for whole, _ in shapes))


def read_sizes(hf_config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that the description needs. Raises: ModelFileError."""
    reader = HFConfigReader(hf_config)
    return {name: reader.integer(name) for name in SIZES}


def describe_rank(config: EngineConfig, tp: int) -> RankModel:
    """Return rank 0 of `tp` ranks: heads, MLP columns (each expert's, too) and vocabulary are split.

    Raises: ConfigError if `tp` does not divide them.
    """
    found = BY_DTYPE[config.dtype]
    try:
        built = _Builder(read_sizes(config.model.hf_config), tp, found, DTYPES[config.dtype]).build()
    except UnevenSplitError as error:
        fits = 1 << tp.bit_length() - 1
        raise UnevenSplitError(f"{error}; the nearest that fits: --tensor-parallel-size {fits}") from None
    weights = []
    for name, (whole, shape) in built.shapes.items():
        weights.append(weigh(name, whole, shape, found if len(shape) == 2 else None, config))
    return RankModel(tuple(weights), built.names, built.body, built.head, config.model.cache_specs, can_run=False)


@dataclass
class _Builder:
    """Adds the instructions of a model and the shapes (whole, of this rank) of its parameters."""

    size: Mapping[str, int]
    tp: int
    format: WeightFormat
    value_bytes: int
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    head: list[Instruction] = field(default_factory=list)

    def build(self) -> "_Builder":
        """Add embedding, layers and head."""
        size, (_, num_rows) = self.size, share_vocabulary(self.size["vocab_size"], LocalGroup(0, self.tp))
        width, table = size["hidden_size"], (size["vocab_size"], size["hidden_size"])
        embedding = self._parameter("embed_tokens", table, (num_rows, width))
        self.body.append(Embed(embedding, self.format, Buffer(width), 0, False))
        self._reduce(width)
        for layer in range(size["num_hidden_layers"]):
            self._attention(f"layers.{layer}.self_attn.")
            if layer < size["first_k_dense_replace"]:
                self._mlp(f"layers.{layer}.mlp.", size["intermediate_size"])
            else:
                self._experts(f"layers.{layer}.mlp.")
            self._reduce(width)
        self._norm("norm", width)
        head = self._parameter("lm_head", table, (num_rows, width))
        self.head.append(Gemm(head, None, self.format, _columns(width), Buffer(num_rows)))
        if self.tp > 1:
            self.head.append(AllGather(_columns(num_rows), Buffer(table[0]), self.tp, self.value_bytes))
        return self

    def _attention(self, at: str) -> None:
        size, width, rank = self.size, self.size["hidden_size"], self.size["kv_lora_rank"]
        heads = share("attention heads", size["num_attention_heads"], LocalGroup(0, self.tp))
        rotary, nope, value = size["qk_rope_head_dim"], size["qk_nope_head_dim"], size["v_head_dim"]
        self._norm(f"{at[:-10]}input_layernorm", width)
        self._product(f"{at}q_a_proj", size["q_lora_rank"], width)
        self._norm(f"{at}q_a_layernorm", size["q_lora_rank"])
        self._product(f"{at}q_b_proj", heads.whole * (nope + rotary), size["q_lora_rank"], rows=self.tp)
        self._product(f"{at}kv_a_proj_with_mqa", rank + rotary, width)
        self._norm(f"{at}kv_a_layernorm", rank)
        # The expansion of keys and values, or, absorbed, the same products with queries and outputs.
        self._product(f"{at}kv_b_proj", heads.whole * (nope + value), rank, rows=self.tp)
        self.body.append(WriteLatent(heads.size, rank, rotary, nope, value))
        self.body.append(LatentAttend(heads.size, rank, rotary, nope, value))
        self._product(f"{at}o_proj", width, heads.whole * value, columns=self.tp)
        self._reduce(width)
        self._norm(f"{at[:-10]}post_attention_layernorm", width)

    def _mlp(self, at: str, inner: int) -> None:
        share("MLP columns", inner, LocalGroup(0, self.tp))
        for name in ("gate_proj", "up_proj"):
            self._product(at + name, inner, self.size["hidden_size"], rows=self.tp)
        self._product(f"{at}down_proj", self.size["hidden_size"], inner, columns=self.tp)

    def _experts(self, at: str) -> None:
        size, width = self.size, self.size["hidden_size"]
        num_experts, inner = size["n_routed_experts"], share(
            "expert columns", size["moe_intermediate_size"], LocalGroup(0, self.tp)
        )  # fmt: skip
        self._product(f"{at}gate", num_experts, width)
        logits, active = _columns(num_experts), size["num_experts_per_tok"]
        route = Route(logits, Buffer(2 * active), Buffer(2 * active), num_experts, active, renormalise=True)
        self.body.append(route)
        for name, (rows, columns) in {"gate_proj": (inner.size, width), "up_proj": (inner.size, width),
                                      "down_proj": (width, inner.size)}.items():  # fmt: skip
            whole = (inner.whole, width) if rows == inner.size else (width, inner.whole)
            stacked = (num_experts * whole[0], whole[1])
            weight = self._parameter(f"{at}experts.{name}", stacked, (num_experts * rows, columns))
            out = Buffer(active * rows)
            self.body.append(ExpertGemm(weight, None, self.format, route, _columns(columns), route.routed, out))
        self._mlp(f"{at}shared_experts.", size["n_shared_experts"] * inner.whole)

    def _parameter(self, name: str, whole: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        weight = torch.empty(shape, device="meta")
        self.names[id(weight)] = f"{name}.weight"
        self.shapes[f"{name}.weight"] = whole, shape
        return weight

    def _product(self, name: str, num_outputs: int, num_inputs: int, rows: int = 1, columns: int = 1) -> None:
        shape = (num_outputs // rows, num_inputs // columns)
        weight = self._parameter(name, (num_outputs, num_inputs), shape)
        self.body.append(Gemm(weight, None, self.format, _columns(shape[1]), Buffer(shape[0])))

    def _norm(self, name: str, width: int) -> None:
        weight = self._parameter(name, (width,), (width,))
        self.body.append(Norm(_columns(width), Buffer(width), weight, None, 1e-6, False))

    def _reduce(self, width: int) -> None:
        if self.tp > 1:
            self.body.append(AllReduce(_columns(width), Buffer(width), self.tp, self.value_bytes))


def _columns(width: int) -> Columns:
    return Columns(Buffer(width), 0, width)
