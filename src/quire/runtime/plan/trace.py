"""`trace_model`: run a model once on symbols, and keep what it called.

The model's own code runs unchanged, so a subclass is planned as readily as a model of Quire. Weights are only named:
the parameters may be on the meta device. Next to read: `kernels/tracing.py`, then `lower.py`.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import nn

from quire.kernels.tracing import NotTraceableError, Symbol, Trace


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Stands for one layer's KV cache in a trace."""

    layer_index: int


@dataclass(frozen=True, slots=True)
class TracedModel:
    """Calls of `forward`, whose result is the hidden states [T, E], and of `compute_logits`."""

    forward: Trace
    hidden: Symbol
    head: Trace
    logits: Symbol


def trace_model(model: nn.Module, layer_groups: tuple[int, ...]) -> TracedModel:
    """Trace both. `layer_groups`: per layer its KV cache group.

    Raises: NotTraceableError for what a plan cannot hold.
    """
    forward = Trace()
    batch = SimpleNamespace(
        positions=forward.record("positions", (), ()),
        kv_caches=tuple(LayerCache(index) for index in range(len(layer_groups))),
        layer_groups=layer_groups,
        slot_mapping=(None,) * (max(layer_groups) + 1),
    )
    hidden = _symbol(model(forward.record("token_ids", (), ()), batch))
    head = Trace()
    compute_logits: Any = model.compute_logits
    logits = _symbol(compute_logits(head.record("hidden", (), hidden.shape)))
    return TracedModel(forward, hidden, head, logits)


def _symbol(result: Any) -> Symbol:
    if not isinstance(result, Symbol) or not result.is_whole:
        raise NotTraceableError("a result that is not one value")
    return result
