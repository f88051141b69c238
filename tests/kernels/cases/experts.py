"""Cases of `kernels/experts.py`, and the formulas that it must equal."""

from functools import partial
from typing import Any

from quire.kernels.experts import ALPHA, CLAMPED, LIMIT, SOFTMAX, ExpertScoring, experts, route
from quire.lazy_torch import Tensor, torch
from tests.kernels.case import Arguments, Check, random
from tests.kernels.cases.activations import FORMULAS


def _is_among(values: Tensor, count: int) -> Tensor:
    """Values before which fewer than `count` others come, which are larger or equal and of lower index."""
    index = torch.arange(values.shape[1], device=values.device)
    other, this = values[:, None, :], values[:, :, None]
    is_before = (other > this) | ((other == this) & (index[None, None] < index[None, :, None]))
    return is_before.sum(-1) < count


def _route_formula(
    logits: Tensor, top_k: int, renormalise: bool, scoring: ExpertScoring = SOFTMAX, bias: Any = None, scales: Any = 1
) -> Tensor:
    numerators = 1 / (1 + torch.exp(-logits)) if scoring.is_sigmoid else torch.exp(logits)
    ranked = logits if bias is None else numerators + bias
    size = logits.shape[1] // scoring.num_groups
    largest = ranked.reshape(-1, scoring.num_groups, size).sort(-1).values[..., size - scoring.group_best :]
    allowed = _is_among(largest.sum(-1), scoring.top_groups).repeat_interleave(size, 1)
    is_chosen = _is_among(torch.where(allowed, ranked, -torch.inf), top_k)
    total = torch.where(is_chosen, numerators, 0) if renormalise else numerators
    total = torch.ones_like(total) / size / scoring.num_groups if scoring.is_sigmoid and not renormalise else total
    return torch.where(is_chosen, scoring.factor * numerators / total.sum(-1, keepdim=True) * scales, 0)


def _formula(
    x: Any, weights: Any, gate_up: Any, down: Any, name: str, gate_up_bias: Any = None, down_bias: Any = None
) -> Any:
    """All experts on all rows."""
    num_experts, inner = weights.shape[1], down.shape[1]
    gates, ups = (
        (x @ gate_up.T + (0 if gate_up_bias is None else gate_up_bias)).view(-1, num_experts, 2, inner).unbind(2)
    )
    if name == CLAMPED:
        gates, ups = torch.where(gates > LIMIT, LIMIT, gates), ups.clamp(-LIMIT, LIMIT)
        gated = gates / (1 + torch.exp(-ALPHA * gates)) * (ups + 1)
    else:
        gated = FORMULAS[name](gates) * ups
    results = torch.einsum("txf,xef->txe", gated, down.view(num_experts, -1, inner))
    results = results + (0 if down_bias is None else down_bias.view(num_experts, -1))
    return torch.einsum("tx,txe->te", weights, results)


def _make_logits(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    renormalise: bool,
    levels: float = 0,
    scoring: ExpertScoring = SOFTMAX,
) -> Arguments:
    logits = random(num_tokens, num_experts, scale=2.0)
    logits = torch.round(logits * levels) / levels if levels else logits
    bias = random(num_experts, seed=1, scale=0.3) if scoring.is_sigmoid else None
    return {"logits": logits, "top_k": top_k, "renormalise": renormalise, "scoring": scoring, "bias": bias}


def _make(num_tokens: int, width: int, inner: int, num_experts: int, top_k: int, name: str = "silu") -> Arguments:
    weights = route.reference(random(num_tokens, num_experts, seed=3), top_k, True)
    gate_up = random(num_experts * 2 * inner, width, seed=1, scale=width**-0.5)
    down = random(num_experts * width, inner, seed=2, scale=inner**-0.5)
    given = {"x": random(num_tokens, width), "weights": weights, "gate_up": gate_up, "down": down, "name": name}
    if name == CLAMPED:
        biases = random(num_experts * 2 * inner, seed=4, scale=4.0), random(num_experts * width, seed=5)
        given |= dict(zip(("gate_up_bias", "down_bias"), biases, strict=True))
    return given


CHECKS = (
    Check(
        route,
        _route_formula,
        {
            "empty": partial(_make_logits, 0, 8, 2, True),
            "eight of 128": partial(_make_logits, 5, 128, 8, False),
            "equal logits": partial(_make_logits, 33, 9, 4, True, levels=1),
            "all": partial(_make_logits, 3, 5, 5, True),
            "scaled": lambda: {**_make_logits(9, 24, 3, True), "scales": random(24, seed=2)},
            "two of four groups": partial(_make_logits, 9, 24, 3, False, scoring=ExpertScoring(False, 4, 2, 1, 16.0)),
            "sigmoid": partial(_make_logits, 9, 24, 3, False, scoring=ExpertScoring(True)),
            "sigmoid, three of six groups": partial(
                _make_logits, 9, 24, 5, True, scoring=ExpertScoring(True, 6, 3, 2, 2.5)
            ),
        },
    ),
    Check(
        experts,
        _formula,
        {
            "empty": partial(_make, 0, 32, 16, 4, 2),
            "one row": partial(_make, 1, 64, 32, 8, 2),
            "odd sizes": partial(_make, 19, 35, 21, 5, 3, "gelu"),
            "clamped, with biases": partial(_make, 9, 32, 16, 4, 2, CLAMPED),
            "one expert": partial(_make, 3, 32, 16, 1, 1, "relu"),
        },
    ),
)
