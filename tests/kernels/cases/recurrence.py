"""Cases of `kernels/recurrence.py`, and the formulas that it must equal."""

from functools import partial
from types import SimpleNamespace
from typing import Any

from quire.kernels.recurrence import EPSILON, causal_conv, linear_recurrence, states
from quire.lazy_torch import torch
from tests.kernels.case import Arguments, Check, random
from tests.kernels.cases.activations import FORMULAS


def _conv_formula(x: Any, weight: Any, bias: Any, activation: Any, cache: Any, step: Any, group_index: int) -> Any:
    """Sums of shifted inputs."""
    taps = weight.view(-1, x.shape[1])
    outs = [x[:0]]
    for rows, state, is_fresh in states(cache, step, group_index, 0, (len(taps) - 1, x.shape[1])):
        inputs = torch.cat((torch.zeros_like(state) if is_fresh else state, x[rows])).to(x.dtype)
        count = rows.stop - rows.start
        sums = torch.zeros_like(x[rows]) if bias is None else bias.expand(count, -1)
        for j, of_tap in enumerate(taps):
            sums = sums + of_tap * inputs[j : j + count]
        outs.append(sums if activation is None else FORMULAS[activation](sums))
    return torch.cat(outs)


def _formula(
    q: Any, k: Any, v: Any, gates: Any, log_rates: Any, time_bias: Any, skip: Any, delta: bool, **place: Any
) -> Any:
    """Per head a product of transition matrices: S_t = decay (I - s k kᵀ) S_{t-1} + s k vᵀ, s being the strength."""
    out, (_, num_heads, value_size), size = torch.empty_like(v), v.shape, q.shape[2]
    for rows, state, is_fresh in states(shape=(num_heads, size, value_size), **place):
        for head in range(num_heads):
            now = torch.zeros_like(state[head]).to(v.dtype) if is_fresh else state[head].to(v.dtype)
            key_head = head * q.shape[1] // num_heads
            for t in range(rows.start, rows.stop):
                query, key, dt = q[t, key_head], k[t, key_head], torch.ones((), dtype=v.dtype, device=v.device)
                if gates is not None:
                    dt = torch.log(1 + torch.exp(gates[t, head] + (0 if time_bias is None else time_bias[head])))
                decay = 1 if log_rates is None else torch.exp(-torch.exp(log_rates[head]) * dt)
                transition, strength = torch.eye(size, dtype=v.dtype, device=v.device), dt
                if delta and gates is not None:
                    strength = 1 / (1 + torch.exp(-gates[t, num_heads + head]))
                    query = query / torch.sqrt((query * query).sum() + EPSILON) / size**0.5
                    key = key / torch.sqrt((key * key).sum() + EPSILON)
                    transition = transition - strength * key[:, None] * key[None]
                now = decay * (transition @ now) + strength * key[:, None] * v[t, head][None]
                out[t, head] = query @ now + (0 if skip is None else skip[head] * v[t, head])
    return out


def _make_step(requests: list[tuple[int, int]], state_bytes: int) -> Arguments:
    """Requests of (new tokens, tokens before) and a cache with random states, NaN where no request lies."""
    cache = torch.full((len(requests) + 3, state_bytes // 4 + 5), torch.nan)
    pages = torch.randperm(len(requests) + 2, generator=torch.Generator().manual_seed(2))[: len(requests)] + 1
    for page, (_, before) in zip(pages.tolist(), requests, strict=True):
        cache[page, : state_bytes // 4] = random(state_bytes // 4, seed=page) if before else torch.nan
    step = SimpleNamespace(
        block_tables=(pages[:, None].to(torch.int32),),
        query_lens_list=tuple(new for new, _ in requests),
        seq_lens_list=tuple(new + before for new, before in requests),
    )
    return {"cache": cache.view(torch.uint8)[:, :state_bytes], "step": step, "group_index": 0}


def _make_conv(
    requests: list[tuple[int, int]], channels: int, taps: int, activation: str | None = "silu", bias: bool = False
) -> Arguments:
    num_tokens = sum(new for new, _ in requests)
    return {
        "x": random(num_tokens, channels + 3)[:, :channels], "weight": random(taps * channels, seed=1, scale=0.5),
        "bias": random(channels, seed=2) if bias else None, "activation": activation,
        **_make_step(requests, 4 * (taps - 1) * channels),
    }  # fmt: skip


def _make(
    requests: list[tuple[int, int]], key_heads: int, heads: int, sizes: tuple[int, int], kind: str = "delta"
) -> Arguments:
    num_tokens, (key_size, value_size), has_gates = sum(new for new, _ in requests), sizes, kind != "attention"
    step = _make_step(requests, 64 + 4 * heads * key_size * value_size)
    gates = random(num_tokens, (1 + (kind == "delta")) * heads, seed=4) if has_gates else None
    scale = 1.0 if kind == "delta" else key_size**-0.5
    return {
        "q": random(num_tokens, key_heads, key_size, seed=1, scale=scale),
        "k": random(num_tokens, key_heads, key_size, seed=2, scale=scale),
        "v": random(num_tokens, heads, value_size, seed=3), "gates": gates, "log_rates": random(heads, seed=5),
        "time_bias": random(heads, seed=6) if has_gates else None,
        "skip": random(heads, seed=7) if kind == "space" else None,
        **step, "offset_bytes": 64, "delta": kind == "delta",
    }  # fmt: skip


_MIXED = [(1, 30), (5, 0), (3, 17), (1, 0), (12, 9)]


CHECKS = (
    Check(
        causal_conv,
        _conv_formula,
        {
            "empty": partial(_make_conv, [], 8, 4),
            "mixed": partial(_make_conv, _MIXED, 70, 4),
            "three taps, bias, no activation": partial(_make_conv, _MIXED, 33, 3, None, bias=True),
        },
    ),
    Check(
        linear_recurrence,
        _formula,
        {
            "empty": partial(_make, [], 2, 4, (8, 8)),
            "delta rule": partial(_make, _MIXED, 2, 4, (16, 20)),
            "delta rule, one head": partial(_make, _MIXED, 1, 1, (10, 6)),
            "state space": partial(_make, _MIXED, 1, 6, (12, 9), "space"),
            "linear attention": partial(_make, _MIXED, 3, 3, (8, 16), "attention"),
        },
    ),
)
