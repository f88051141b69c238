"""`trace_model`: run a model once on symbols, and keep what it called.

The model's own code runs unchanged, so a subclass is planned as readily as a model of Quire. Weights are only named:
parameters have no values. Next to read: `kernels/tracing.py`, then `lower.py`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from quire import nn
from quire.errors import QuireError
from quire.kernels.registry import import_operations
from quire.kernels.tracing import NotTraceableError, Symbol, Trace
from quire.lazy_torch import tensor_types
from quire.models.hf_predictor import predict, predicted_logits


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Stands for one layer's KV cache in a trace."""

    layer_index: int
    group_index: int


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """Of a `ForwardBatch` the fields that a plan can hold."""

    token_ids: Symbol
    positions: Symbol
    kv_caches: tuple[LayerCache, ...]
    layer_groups: tuple[int, ...]
    slot_mapping: tuple[None, ...]

    def __getattr__(self, name: str) -> Any:
        raise NotTraceableError(f"the batch's {name}")


@dataclass(frozen=True, slots=True)
class TracedModel:
    """Calls of `forward`, whose result is the hidden states [T, E], and of `compute_logits`.

    `kept`: values [T, E] of some layers that stay until the next step.
    """

    forward: Trace
    hidden: Symbol
    head: Trace
    logits: Symbol
    kept: tuple[Symbol, ...] = ()


def trace_model(model: Any, layer_groups: tuple[int, ...], *, predictor: int | None = None) -> TracedModel:
    """Trace both.

    `layer_groups`: per layer its KV cache group. `predictor`: the index of a layer that predicts further
    tokens, which is traced instead of the model.

    Raises: NotTraceableError for what a plan cannot hold.
    """
    import_operations()
    try:
        traced = _trace(model, layer_groups, predictor=predictor)
    except (NotTraceableError, QuireError):
        raise
    except Exception as error:
        # Whatever else a symbol cannot do: operators, indices, a tensor's type. A model that is wrong fails again
        # with its own error when it runs op by op.
        raise NotTraceableError(f"{type(error).__name__}: {error}") from error
    _check_weights(model, traced)
    return traced


def _trace(model: Any, layer_groups: tuple[int, ...], *, predictor: int | None) -> TracedModel:
    forward = Trace()
    # First, so that no other value has its place before.
    given = [forward.record("given", (), (model.config.hidden_size,))] if predictor is not None else []
    token_ids = forward.record("token_ids", (), ())
    batch = TracedBatch(
        token_ids,
        positions=forward.record("positions", (), ()),
        kv_caches=tuple(LayerCache(layer, group) for layer, group in enumerate(layer_groups)),
        layer_groups=layer_groups,
        slot_mapping=(None,) * (max(layer_groups) + 1),
    )
    model.kept = []
    compute_hidden: Any = model if predictor is None else partial(predict, model, predictor)
    hidden = _vector(compute_hidden(token_ids, batch, *given))
    head = Trace()
    compute_logits: Any = model.compute_logits
    if predictor is not None:
        compute_logits = partial(predicted_logits, model, predictor)
    logits = _vector(compute_logits(head.record("hidden", (), hidden.sizes)))
    return TracedModel(forward, hidden, head, logits, tuple(model.kept))


def trace_join(model: Any) -> tuple[Trace, Symbol]:
    """Trace how an EAGLE head makes one value of the kept ones."""
    trace = Trace()
    given: Any = trace.record("given", (), (model.eagle.fc.weight.shape[1],))
    return trace, _vector(model.eagle.fc(given))


def _vector(result: Any) -> Symbol:
    if not isinstance(result, Symbol) or not result.is_whole or len(result.sizes) != 1:
        raise NotTraceableError("a result that is not one value")
    return result


def _check_weights(model: Any, traced: TracedModel) -> None:
    """Only parameters are packed; rotation frequencies are copied as they are."""
    known = {id(parameter) for _, parameter in nn.named_parameters(model)}
    tensors = tensor_types()
    weights: tuple[type, ...] = (nn.Parameter, *tensors)
    for call in (*traced.forward.calls, *traced.head.calls):
        for argument in call.arguments:
            if call.operation == "rotation" and isinstance(argument, tensors):
                raise NotTraceableError("rotation frequencies without values: make them on device='cpu'")
            if isinstance(argument, weights) and id(argument) not in known:
                raise NotTraceableError(f"weights of {call.operation} that are computed")
