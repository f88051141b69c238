"""Models made of a list of operations, run op by op and as plans, in any format of weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from quire import _native
from quire.cache_spec import CacheGroup, PagedKV
from quire.kernels.activations import gelu, relu, silu_and_mul
from quire.kernels.instruction import Packing
from quire.kernels.layer_norm import layer_norm
from quire.kernels.linear import linear
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import rope
from quire.layers.attention import Attention
from quire.layers.rotary import RotaryEmbedding
from quire.nn import named_parameters
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.plan.emit import BODY, LOGITS, PlanLimits, PlannedModel
from quire.runtime.plan.lower import Program, lower
from quire.runtime.plan.packed_weights import PackedWeights
from quire.runtime.plan.trace import trace_model
from quire.runtime.worker import kv_layers
from tests.runtime.builders import make_config

WIDTH, VOCAB_SIZE, HEADS, KV_HEADS, HEAD_SIZE = 32, 19, 2, 1, 16
QKV_WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
SPEC = PagedKV(KV_HEADS, HEAD_SIZE, 4)
Format = _native.WeightFormat
KINDS = ("linear", "gated", "gelu", "relu", "rms_norm", "layer_norm", "add", "attention", "activated")


@dataclass(frozen=True)
class Op:
    """An operation on earlier values, by index: 0 is the embedding, 1 the first operation's result."""

    kind: str
    inputs: tuple[int, ...]


class GraphModel(nn.Module):
    """`ops` one after another, each [T, WIDTH] to [T, WIDTH]; the last one's result is the hidden state."""

    def __init__(self, ops: Sequence[Op], rounded: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        """`rounded`: what becomes of a linear layer's input when tensors are computed with."""
        super().__init__()
        self.ops, self.rounded = tuple(ops), rounded
        generator = torch.Generator().manual_seed(5)
        shapes = {"table": (VOCAB_SIZE, WIDTH), "head": (VOCAB_SIZE, WIDTH)}
        self.layer_of: dict[int, Attention] = {}
        for index, op in enumerate(self.ops):
            shapes |= {f"{name}_{index}": shape for name, shape in SHAPES.get(op.kind, {}).items()}
            if op.kind == "attention":
                self.layer_of[index] = Attention(len(self.layer_of), HEAD_SIZE)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.3)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.rotary = RotaryEmbedding(1.0 / 100.0 ** (torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2)))
        self.num_layers = len(self.layer_of)
        self.config = SimpleNamespace(
            num_layers=self.num_layers, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE,
            kv_specs=lambda: [SPEC] * self.num_layers,
        )  # fmt: skip

    def linear(self, x: Any, weight: Any, bias: Any) -> Any:
        return linear(self.rounded(x) if isinstance(x, torch.Tensor) else x, weight, bias)

    def forward(self, token_ids: Any, batch: Any) -> Any:
        values = [nn.functional.embedding(token_ids, self.table)]
        rotation = self.rotary(batch.positions)
        for index, op in enumerate(self.ops):
            inputs = [values[i] for i in op.inputs]
            values.append(getattr(self, f"_{op.kind}")(index, *inputs, *((rotation, batch) * (op.kind == "attention"))))
        return values[-1]

    def compute_logits(self, hidden: Any) -> Any:
        return self.linear(hidden, self.head, None)

    def _parameters_of(self, index: int) -> list[nn.Parameter]:
        return [getattr(self, f"{name}_{index}") for name in SHAPES[self.ops[index].kind]]

    def _linear(self, index: int, x: Any) -> Any:
        return self.linear(x, *self._parameters_of(index))

    def _activated(self, index: int, x: Any) -> Any:
        return relu(self.linear(x, *self._parameters_of(index)))

    def _gated(self, index: int, x: Any) -> Any:
        up, down = self._parameters_of(index)
        return self.linear(silu_and_mul(self.linear(x, up, None)), down, None)

    def _gelu(self, index: int, x: Any) -> Any:
        return gelu(x)

    def _relu(self, index: int, x: Any) -> Any:
        return relu(x)

    def _rms_norm(self, index: int, x: Any) -> Any:
        return rms_norm(x, *self._parameters_of(index), 1e-5)

    def _layer_norm(self, index: int, x: Any) -> Any:
        return layer_norm(x, *self._parameters_of(index), 1e-5)

    def _add(self, index: int, a: Any, b: Any) -> Any:
        return a + b

    def _attention(self, index: int, x: Any, rotation: Any, batch: Any) -> Any:
        qkv = self.linear(x, *self._parameters_of(index)).view(-1, HEADS + 2 * KV_HEADS, HEAD_SIZE)
        qk, v = qkv.split((HEADS + KV_HEADS, KV_HEADS), dim=1)
        q, k = rope(qk, *rotation).split((HEADS, KV_HEADS), dim=1)
        return self.layer_of[index](q, k, v, batch).flatten(1)


SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)},
    "activated": {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)},
    "gated": {"up": (2 * WIDTH, WIDTH), "down": (WIDTH, WIDTH)},
    "attention": {"qkv": (QKV_WIDTH, WIDTH), "qkv_bias": (QKV_WIDTH,)},
    "rms_norm": {"norm": (WIDTH,)},
    "layer_norm": {"norm": (WIDTH,), "shift": (WIDTH,)},
}


def program_of(model: nn.Module, weight_format: Any = Format.f32, num_layers: int | None = None) -> Program:
    """Traced and lowered, all matrices being of one format."""
    count = model.num_layers if num_layers is None else num_layers
    return lower(trace_model(model, (0,) * max(count, 1)), lambda each: Packing.whole(len(each), weight_format))


def packed(model: nn.Module, weight_format: Any) -> PackedWeights:
    parameters = dict(named_parameters(model))
    weights = PackedWeights(
        parameters, {name: Packing.whole(len(each), weight_format) for name, each in parameters.items()}
    )
    for name, parameter in parameters.items():
        weights.put_values(name, parameter.data)
    return weights


def planned(model: nn.Module, weight_format: Any = Format.f32, *, max_tokens: int = 32, num_threads: int = 1) -> Any:
    """Return a plan with a KV pool of NaN, and the engine that holds the pool."""
    group = CacheGroup(tuple(range(model.num_layers)), SPEC)
    config = make_config(kv_cache_groups=(group,), num_blocks=8, block_size=16)
    cache = CacheEngine(config)
    cache.pool.fill_(float("nan"))
    program, limits = program_of(model, weight_format), PlanLimits(max_tokens, 2, 8)
    result = PlannedModel(program, packed(model, weight_format), kv_layers(config, cache), limits, num_threads)
    result.cache = cache  # type: ignore[attr-defined]  # the plan has its addresses only
    return result


def run_prompt(plan: PlannedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Hidden states of one prompt in one step. Shapes: [T, WIDTH]."""
    tokens = np.array([token_ids], np.int32)
    tables = np.arange(1, 8, dtype=np.int32).reshape(1, 1, -1)
    zero, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
    plan.run(BODY, zero, zero, np.array([len(token_ids)], np.int32), none, tokens, tables)
    return torch.tensor(plan.hidden[: len(token_ids)])


def logits_of(plan: PlannedModel, rows: Sequence[int], part: int = LOGITS) -> torch.Tensor:
    """Return the logits of rows of the last step; with GREEDY only the likeliest token is computed."""
    none, table = np.zeros(0, np.int32), np.zeros((1, 1, 1), np.int32)
    plan.run(part, none, none, none, np.array(rows, np.int32), np.zeros((1, 1), np.int32), table)
    return torch.tensor(plan.logits[: len(rows)])
