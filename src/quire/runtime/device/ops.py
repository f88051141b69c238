"""The operations of a device plan, as PyTorch functions: what they mean, and what runs where no kernel is faster.

`OPS` has one function per native op (`native/ops/`), by its name and with its fields: `fn(step, **values)`, where
tensors are views of static memory, and `step` has the lengths, slots and tables. Nothing is read on the host, and no
shape depends on a value, so that a graph can capture any of them.
Next to read: `plan.py`, then `triton_ops.py` for the fast ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from quire._native import Activation
from quire.kernels import experts
from quire.kernels.activations import OPERATORS
from quire.runtime.device.memory import StepMemory


@dataclass(frozen=True, slots=True)
class KvView:
    """The cache of a layer.

    `values`: [N, 2, B, K, D] or, of latents, [N, B, W], strided; `group`: the index of its block tables.
    """

    values: torch.Tensor
    group: int


OPS: dict[str, Callable[..., None]] = {}


def device_op(function: Callable[..., None]) -> Callable[..., None]:
    """Put the function into `OPS`."""
    OPS[function.__name__] = function
    return function


def activated(activation: Activation, x: torch.Tensor) -> torch.Tensor:
    """Return the values behind an activation."""
    values: torch.Tensor = x if activation == Activation.none else OPERATORS[activation.name](x)
    return values


# --- Rows ---------------------------------------------------------------------------------------------------


@device_op
def embed(step: StepMemory, table: torch.Tensor, out: torch.Tensor, offset: int, of_positions: bool) -> None:
    """out[t] = table[id of t + offset]; `of_positions`: the id is the position."""
    ids = (step.positions if of_positions else step.token_ids)[: len(out)].long() + offset
    out.copy_(table[ids])


@device_op
def activate(
    step: StepMemory,
    x: torch.Tensor,
    out: torch.Tensor,
    width: int,
    from_logit_rows: bool = False,
    activation: Activation = Activation.none,
    gated: bool = False,
) -> None:
    """out = act(x), or act(first half) · second half; `from_logit_rows`: of the rows whose logits are wanted."""
    if from_logit_rows:
        x = x[step.logit_rows[: len(out)].long()]
    if gated:
        first, up = x.float().chunk(2, 1)
        out.copy_(activated(activation, first) * up)
    else:
        out.copy_(activated(activation, x.float()))


@device_op
def add(step: StepMemory, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """out = a + b."""
    out.copy_(a + b)


@device_op
def multiply(step: StepMemory, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """out = a · b."""
    out.copy_(a * b)


@device_op
def scale(
    step: StepMemory, x: torch.Tensor, out: torch.Tensor, factor: float, by: torch.Tensor | None, width: int
) -> None:
    """out = x · factor, or x · by[0]."""
    out.copy_(x * factor if by is None else x * by[0])


@device_op
def soft_cap(step: StepMemory, x: torch.Tensor, out: torch.Tensor, cap: float, width: int) -> None:
    """out = cap · tanh(x / cap)."""
    out.copy_(cap * torch.tanh(x / cap))


@device_op
def gate_rows(
    step: StepMemory, x: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, per_value: bool, width: int
) -> None:
    """out = x · sigmoid(gates)."""
    out.copy_(x * torch.sigmoid(gates))


@device_op
def norm(
    step: StepMemory,
    x: torch.Tensor,
    out: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    width: int,
    epsilon: float,
    subtract_mean: bool,
    groups: int,
    add: bool,
    gates: torch.Tensor | None,
    activation: Activation,
    gates_first: bool,
    weight_per_group: bool,
) -> None:
    """RMS norm or layer norm of each group of `width` values, with an activated gate before or behind it."""
    values = x.float().view(len(x), groups, width)
    of_gates = None if gates is None else activated(activation, gates.float()).view(len(x), groups, width)
    if of_gates is not None and gates_first:
        values = values * of_gates
    if subtract_mean:
        values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        values = values * (weight.view(groups, width) if weight_per_group else weight)
    if bias is not None:
        values = values + bias
    if of_gates is not None and not gates_first:
        values = values * of_gates
    values = values.flatten(1)
    out.copy_(out + values if add else values)


@device_op
def gemm(
    step: StepMemory,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    out: torch.Tensor,
    activation: Activation,
    gated: bool,
    add: bool,
    ahead: None,
    lora: None,
) -> None:
    """out = act(x · weightᵀ + bias), or act(first half) · second half; `add`: out += that."""
    values = product(x, weight) if bias is None else product(x, weight) + bias
    if gated:
        first, up = values.chunk(2, 1)
        values = activated(activation, first) * up
    else:
        values = activated(activation, values)
    out.copy_(out + values if add else values)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x · weightᵀ, summed and returned in fp32."""
    if x.device.type == "cuda" and x.dtype == weight.dtype != torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), weight.t().float())


# --- Positions and attention ------------------------------------------------------------------------------------


@device_op
def rotary(
    step: StepMemory,
    frequencies: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    half: int,
    scales: torch.Tensor | None = None,
    num_scales: int = 0,
    scale_period: int = 1,
) -> None:
    """Cosines and sines of each row's position times the frequencies, times the scale of its period."""
    positions = step.positions[: len(cos)]
    angles = positions.float()[:, None] * frequencies
    factor: Any = 1.0
    if scales is not None:
        factor = scales[(positions // scale_period).clamp(max=num_scales - 1).long()][:, None]
    cos.copy_(angles.cos() * factor)
    sin.copy_(angles.sin() * factor)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the values with pairs (i, i + C / 2) rotated. Shapes: x [T, H, D]; cos, sin [T, C / 2]. Dtypes: fp32."""
    half = cos.shape[1]
    a, b = x[..., :half], x[..., half : 2 * half]
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, x[..., 2 * half :]), -1)


@device_op
def rope(
    step: StepMemory,
    x: torch.Tensor,
    out: torch.Tensor,
    num_heads: int,
    head_size: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    half: int,
) -> None:
    """out = the rotated heads of x."""
    out.copy_(rotated(x.view(len(x), num_heads, head_size).float(), cos, sin).flatten(1))


@device_op
def write_kv(
    step: StepMemory,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    epsilon: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    half: int,
    q_cos: torch.Tensor | None,
    q_sin: torch.Tensor | None,
    kv: KvView,
) -> None:
    """Norms of heads and rotation of queries, in place, and of keys; keys and values to the cache."""
    block_size, num_kv_heads, size = kv.values.shape[2:]
    own = cos if q_cos is None else q_cos, sin if q_sin is None else q_sin
    parts = []
    for x, heads, weight, (c, s) in ((q, num_heads, q_norm, own), (k, num_kv_heads, k_norm, (cos, sin))):
        x = x.float().view(len(q), heads, size)
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight
        parts.append(x if c is None or s is None else rotated(x, c, s))
    q.copy_(parts[0].flatten(1))
    # Rows of padding write to block 0, which no mask lets through.
    slots = step.slots[kv.group, : len(q)].long().clamp(min=0)
    for plane, values in enumerate((parts[1], v.reshape(len(q), num_kv_heads, size))):
        kv.values[slots // block_size, plane, slots % block_size] = values.to(kv.values.dtype)


@device_op
def attend(
    step: StepMemory,
    q: torch.Tensor,
    stride: int,
    out: torch.Tensor,
    num_heads: int,
    window: int,
    scale: float,
    kv: KvView,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Attention through the block tables, padded to the longest sequence that these hold: slow, without a host read."""
    num_kv_heads, size = kv.values.shape[3:]
    num_rows, group = len(q), num_heads // num_kv_heads
    request = step.request_of[:num_rows].long()
    keys = torch.arange(step.longest, device=q.device)
    blocks = step.tables[kv.group][step.rows.long()].long()  # [R, M]
    k, v = (x.flatten(1, 2)[request] for x in kv.values[blocks].float().unbind(2))  # [T, P, K, D]
    queries = q.float().view(num_rows, num_kv_heads, group, size)
    scores = scale * torch.einsum("tkgd,tpkd->tkgp", queries, k)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = step.positions[:num_rows, None]
    seen = keys <= position
    if window:
        seen &= keys > position - window
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        of_heads = sinks.float().view(1, num_kv_heads, group, 1).expand(num_rows, -1, -1, 1)
        scores = torch.cat((scores, of_heads), -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    v = torch.where(seen[:, :, None, None], v, 0.0)  # what is not seen may be NaN
    out.copy_(torch.einsum("tkgp,tpkd->tkgd", weights, v).reshape(num_rows, -1))


@device_op
def write_latent(
    step: StepMemory,
    q: torch.Tensor,
    rotary: torch.Tensor,
    latent: torch.Tensor,
    q_stride: int,
    rotary_stride: int,
    latent_stride: int,
    num_heads: int,
    head_size: int,
    cos: Any,
    sin: Any,
    half: int,
    rank: int,
    kv: KvView,
) -> None:
    """Rotation of queries, in place, and of the rotary key; latent and rotary key to the cache."""
    key = rotary.float()
    if half:
        q.copy_(rotated(q.float().view(len(q), num_heads, head_size), cos, sin).flatten(1))
        key = rotated(key[:, None], cos, sin)[:, 0]
    block_size = kv.values.shape[1]
    slots = step.slots[kv.group, : len(q)].long().clamp(min=0)
    entries = torch.cat((latent.float(), key), -1)
    kv.values[slots // block_size, slots % block_size] = entries.to(kv.values.dtype)


@device_op
def latent_attend(
    step: StepMemory,
    q: torch.Tensor,
    q_stride: int,
    up: torch.Tensor,
    out: torch.Tensor,
    work: torch.Tensor,
    work_stride: int,
    num_heads: int,
    rank: int,
    rotary: int,
    nope: int,
    value: int,
    scale: float,
    kv: KvView,
) -> None:
    """Latent attention in its absorbed form (`kernels/latent_attention.py`), padded as `attend`."""
    num_rows = len(q)
    request = step.request_of[:num_rows].long()
    keys = torch.arange(step.longest, device=q.device)
    seen = keys <= step.positions[:num_rows, None]  # [T, P]
    entries = kv.values[step.tables[kv.group][step.rows.long()].long()].float().flatten(1, 2)[request]  # [T, P, W]
    entries = torch.where(seen[..., None], entries, 0.0)  # what is not seen may be NaN
    to_keys, to_values = up.float().view(num_heads, nope + value, rank).split((nope, value), 1)
    turned, plain = q.float().view(num_rows, num_heads, rotary + nope).split((rotary, nope), -1)
    queries = torch.cat((torch.einsum("thn,hnr->thr", plain, to_keys), turned), -1)  # [T, H, W]
    scores = scale * torch.einsum("thw,tpw->thp", queries, entries)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    results = torch.einsum("thp,tpr->thr", weights, entries[..., :rank])
    out.copy_(torch.einsum("thr,hmr->thm", results, to_values).flatten(1))


# --- Experts ----------------------------------------------------------------------------------------------------


@device_op
def route(
    step: StepMemory,
    logits: torch.Tensor,
    choices: torch.Tensor,
    routed: torch.Tensor,
    counts: None,
    num_experts: int,
    top_k: int,
    renormalise: bool,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    **scoring: Any,
) -> None:
    """routed = the chosen experts, then their weights. Shapes: routed [T, 2k]."""
    dense = experts.route.reference(logits.float(), top_k, renormalise, experts.ExpertScoring(**scoring), bias, scales)
    order = dense.ne(0).float() * 2 - torch.arange(num_experts, device=dense.device) / num_experts
    ids = torch.sort(order, descending=True, stable=True)[1][:, :top_k]
    routed[:, :top_k] = ids.float()
    routed[:, top_k : 2 * top_k] = dense.gather(1, ids)


def _of_experts(weight: torch.Tensor, num_experts: int, ids: torch.Tensor) -> torch.Tensor:
    return weight.view(num_experts, -1, weight.shape[1])[ids].float()


@device_op
def expert_up(
    step: StepMemory,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    routed: torch.Tensor,
    counts: None,
    num_experts: int,
    activation: Activation,
    alpha: float,
    limit: float,
) -> None:
    """Gated products of each row with its chosen experts: a definition by a gather of whole experts, not for speed."""
    top_k = routed.shape[1] // 2
    ids = routed[:, :top_k].long()
    both = torch.einsum("tkoi,ti->tko", _of_experts(weight, num_experts, ids), x.float())
    if bias is not None:
        both = both + bias.view(num_experts, -1)[ids]
    gates, ups = both.chunk(2, -1)
    if limit:
        gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
        inner = gates * torch.sigmoid(alpha * gates) * (ups + 1)
    else:
        inner = activated(activation, gates) * ups
    out.view(len(out), top_k, -1)[..., : inner.shape[-1]] = inner.to(out.dtype)


@device_op
def expert_down(
    step: StepMemory,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    out: torch.Tensor,
    routed: torch.Tensor,
    counts: None,
    num_experts: int,
    add: bool,
) -> None:
    """out = the sum of the chosen experts' products, each times its weight."""
    top_k = routed.shape[1] // 2
    ids, weights = routed[:, :top_k].long(), routed[:, top_k : 2 * top_k]
    inner = x.view(len(x), top_k, -1)[..., : weight.shape[1]].float()
    results = torch.einsum("tkoi,tki->tko", _of_experts(weight, num_experts, ids), inner)
    if bias is not None:
        results = results + bias.view(num_experts, -1)[ids]
    total = (results * weights[..., None]).sum(1)
    out.copy_(out + total if add else total)
