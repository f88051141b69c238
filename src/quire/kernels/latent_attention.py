"""Latent attention (MLA): keys and values of all heads from one cached latent per token.

Both of its forms, and the rule that chooses between them: `native/ops/latent_work.h`. Next to read:
`models/deepseek_v2.py`; for plans `native/ops/latent_attend.h`.
"""

from dataclasses import dataclass
from typing import Any

from quire._native import RowType, latent_cost
from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, Packing, StepShape
from quire.kernels.lowering import Lowering, lowers
from quire.kernels.paged_attention import StepTables
from quire.kernels.registry import kernel
from quire.kernels.rope import rotation_of
from quire.kernels.tracing import SIZES, Call, NotTraceableError, Symbol
from quire.lazy_torch import Tensor, torch

QUERY_TILE = 256
MAX_ENTRY, MAX_HEAD = 576, 512
"""Values per token in the cache, and of a head's queries and values: what fits a thread's scratch."""


@kernel.with_traits(writes_cache=True, takes_in=("rope",))
def write_latent(latent: Tensor, rotary: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's latent and its rotary key in its slot.

    kv_cache[slot // B, slot % B] = (latent[t], rotary[t]);  slot = slot_mapping[t]

    Shapes: latent [T, R]; rotary [T, 1, C]; kv_cache [N, B, W], W = R + C (may be strided over N); slot_mapping [T],
        no slot twice.
    Dtypes: latent, rotary bf16, fp16 or fp32; kv_cache any of these, values are rounded to it; slot_mapping int64.
    Mutates: kv_cache.
    """
    block_size = kv_cache.shape[1]
    entries = torch.cat((latent, rotary.flatten(1)), -1)
    kv_cache[slot_mapping // block_size, slot_mapping % block_size] = entries.to(kv_cache.dtype)


@kernel.with_traits(takes_in=("rope",))
def latent_attention(
    q: Tensor,
    up: Tensor,
    kv_cache: Tensor,
    step: StepTables,
    group_index: int,
    rotary_size: int,
    scale: float,
) -> Tensor:
    """Attend each query to the latents of its request at its own and earlier positions.

    out[t, h] = softmax(scale · q[t, h] @ K_h[0…p].T) @ V_h[0…p], with p the position of token t, and at each position
    K_h = (rotary key, U_h latent) and V_h = V_h' latent; U_h and V_h' are the U and O rows of head h in `up`.
    (DeepSeek-V2, arXiv 2405.04434, eq. 9-19)

    A request takes the form that costs less for its new tokens: plain as above, or absorbed, where U_h multiplies the
    query and V_h' the result (sec. 2.1.2). Results differ by rounding.

    Request r's token at position p lies at kv_cache[block_tables[group_index][r, p // B], p % B], latent first. Its new
    tokens are the last ones, and are written already. No other entries are read: the rest of the pool may hold NaN.

    Shapes: q [T, H, D], D = C + U, C of them rotated; up [P, R], P = H · (U + O); kv_cache [N, B, W], W = R + C (may be
        strided over N) -> [T, H, O].
    Dtypes: q, up bf16, fp16 or fp32; kv_cache any of these; sums in fp32; returns q.dtype.
    """
    _, num_heads, head_size = q.shape
    rank, nope = up.shape[1], head_size - rotary_size
    projection = up.float().view(num_heads, -1, rank)
    to_keys, to_values = projection[:, :nope], projection[:, nope:]  # [H, U, R], [H, O, R]
    out = torch.empty(*q.shape[:2], to_values.shape[1], dtype=q.dtype, device=q.device)
    token = 0
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        positions = torch.arange(seq_len, device=q.device)
        blocks = step.block_tables[group_index][request, positions // kv_cache.shape[1]].long()
        entries = kv_cache[blocks, positions % kv_cache.shape[1]].float()  # [P, W]
        latents, rotary = entries.split((rank, rotary_size), -1)
        is_plain, _ = latent_cost(seq_len - query_len, query_len, rank, rotary_size, nope, to_values.shape[1])
        if is_plain:
            keys = torch.einsum("pr,hnr->hpn", latents, to_keys)
            keys = torch.cat((rotary.expand(num_heads, -1, -1), keys), -1)  # [H, P, D]
            values = torch.einsum("pr,hmr->hpm", latents, to_values)
        for first in range(0, query_len, QUERY_TILE):
            rows = slice(token + first, token + min(first + QUERY_TILE, query_len))
            queries = q[rows].float().transpose(0, 1)  # [H, t, D]
            if is_plain:
                scores = queries @ keys.transpose(1, 2)
            else:
                absorbed = torch.cat((queries[..., rotary_size:] @ to_keys, queries[..., :rotary_size]), -1)
                scores = absorbed @ entries.T  # [H, t, W] @ [W, P]
            own = positions[seq_len - query_len + first :][: queries.shape[1], None]
            weights = (scale * scores).masked_fill(positions > own, -torch.inf).softmax(-1)  # [H, t, P]
            results = weights @ values if is_plain else weights @ latents @ to_values.transpose(1, 2)
            out[rows] = results.transpose(0, 1).to(q.dtype)
        token += query_len
    return out


@dataclass(eq=False, frozen=True, slots=True)
class WriteLatent(Instruction):
    """Rotation of queries and of the rotary key in place, and the new entries to the cache."""

    q: Columns
    rotary: Columns
    latent: Columns
    num_heads: int
    rotation: tuple[Buffer, Buffer] | None
    layer_index: int

    def emit(self, to: Emitter) -> None:
        cos, sin, half = 0, 0, 0
        if self.rotation is not None:
            cos, sin, half = *map(to.address, self.rotation), self.rotation[0].width
        parts = {"q": self.q, "rotary": self.rotary, "latent": self.latent}
        places = {name: to.address(part) for name, part in parts.items()}
        strides = {f"{name}_stride": part.buffer.row_bytes // 4 for name, part in parts.items()}
        to.push(
            "write_latent",
            **places,
            **strides,
            num_heads=self.num_heads,
            head_size=self.q.width // self.num_heads,
            cos=cos,
            sin=sin,
            half=half,
            rank=self.latent.width,
            kv=to.kv_layer(self.layer_index),
        )

    def cost(self, step: StepShape) -> Cost:
        half = 0 if self.rotation is None else self.rotation[0].width
        flops = 6 * half * (self.num_heads + 1) * step.num_tokens
        return Cost(flops, 0, step.num_tokens * entry_bytes(step, self.latent.width + self.rotary.width))


@dataclass(eq=False, frozen=True, slots=True)
class LatentAttend(Instruction):
    """Attention of `num_heads` heads to the cache's latents, each request in the cheaper form."""

    is_attention = True
    q: Columns
    weight: Any
    packing: Packing
    out: Buffer
    work: Buffer
    num_heads: int
    rotary_size: int
    scale: float
    layer_index: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """R, C, U and O."""
        nope = self.q.width // self.num_heads - self.rotary_size
        return int(self.weight.shape[1]), self.rotary_size, nope, self.out.width // self.num_heads

    def emit(self, to: Emitter) -> None:
        rank, rotary, nope, value = self.sizes
        to.push(
            "latent_attend",
            q=to.address(self.q),
            q_stride=self.q.buffer.row_bytes // 4,
            up=self.weight,
            out=self.out,
            work=to.address(self.work),
            work_stride=self.work.row_bytes // 4,
            num_heads=self.num_heads,
            rank=rank,
            rotary=rotary,
            nope=nope,
            value=value,
            scale=self.scale,
            kv=to.kv_layer(self.layer_index),
        )

    def cost(self, step: StepShape) -> Cost:
        flops = sum(self.num_heads * latent_cost(start, count, *self.sizes)[1] for start, count in step.requests)
        return Cost(flops, self.packing.num_bytes(self.weight.shape[1]) + self.cache_bytes_read(step))

    def cache_bytes_read(self, step: StepShape) -> int:
        rank, rotary, *_ = self.sizes
        return step.num_positions(0) * entry_bytes(step, rank + rotary)


def entry_bytes(step: StepShape, size: int) -> int:
    """Bytes of one token in one layer's cache; int8 has an fp32 scale for each token."""
    return size * step.kv_value_bytes + (4 if step.kv_value_bytes == 1 else 0)


@lowers("write_latent")
def _lower_write(to: Lowering, call: Call) -> None:
    to.notes["write", call.arguments[2].layer_index] = call


@lowers("latent_attention")
def _lower(to: Lowering, call: Call) -> None:
    q, up, cache, _, group_index, rotary_size, scale = call.arguments
    write: Call | None = to.notes.get(("write", cache.layer_index))
    if write is None or group_index != cache.group_index or ("attend", cache.layer_index) in to.notes:
        raise NotTraceableError("attention to another cache than its own layer's, to one not written, or a second one")
    to.notes["attend", cache.layer_index] = call
    latent, rotary = write.arguments[:2]
    (num_heads, head_size), (value_size,) = q.sizes, call.sizes[1:]
    if latent.num_columns + rotary_size > MAX_ENTRY or max(head_size, value_size) > MAX_HEAD:
        raise NotTraceableError(f"latents of more than {MAX_ENTRY} values or heads of more than {MAX_HEAD}")
    rotation = None
    turned = [symbol.call for symbol in (q, rotary) if to.is_waiting(symbol.call) and symbol.is_whole]
    if len(turned) == 2 and all(to.users(each) == [user] for each, user in zip(turned, (call, write), strict=True)):
        q, rotary = (each.arguments[0] for each in turned)
        rotation = rotation_of(to, turned[0])
        for each in turned:
            to.take_in(each)
    place, out = to.columns(q), to.result(call, takes_type=True)
    if out.type == RowType.q8 and value_size % 32:
        out.type = RowType.f32
    entry, state = latent.num_columns + rotary_size, 32 + -(-value_size // 16) * 16
    work = Buffer(num_heads * max(-(-entry // 16) * 16, state))
    to.append(WriteLatent(place, to.columns(rotary), to.columns(latent), num_heads, rotation, cache.layer_index))
    to.append(LatentAttend(place, up, to.packing_of(up), out, work, num_heads, rotary_size, scale, cache.layer_index))


def _sizes(q: Symbol, up: Any, cache: Any, step: Any, group_index: int, rotary_size: int, scale: float) -> Any:
    num_heads, head_size = q.sizes
    if up.shape[0] % num_heads or up.shape[0] // num_heads <= head_size - rotary_size:
        raise NotTraceableError(f"a projection {list(up.shape)} for {num_heads} heads of {head_size}")
    return num_heads, up.shape[0] // num_heads - head_size + rotary_size


SIZES.update(write_latent=lambda *_: (), latent_attention=_sizes)
