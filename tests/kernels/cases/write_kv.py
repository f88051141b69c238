"""Cases of `kernels/write_kv.py`, and the formulas that it must equal."""

from functools import partial

from quire.kernels.write_kv import write_kv
from quire.lazy_torch import Tensor, torch
from tests.kernels.case import Arguments, Check, random


def _formula(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        kv_cache[slot // kv_cache.shape[2], :, slot % kv_cache.shape[2]] = torch.stack((k[token], v[token]))


def _make(
    num_tokens: int, *, kv_heads: int = 3, head_size: int = 64, padding: int = 0, last: bool = False
) -> Arguments:
    """The second layer's view of a block-major pool of NaN; `padding`: further values at the end of each block."""
    num_blocks, block_size = 11, 8
    layer_size = 2 * block_size * kv_heads * head_size
    pool = torch.full((num_blocks, 2 * layer_size + padding), torch.nan)
    view = pool[:, layer_size : 2 * layer_size].view(num_blocks, 2, block_size, kv_heads, head_size)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(3))
    slots = slots.sort().values[-num_tokens:] if last else slots[:num_tokens]
    fused = random(num_tokens, 2 * kv_heads + 1, head_size)
    return {"k": fused[:, :kv_heads], "v": fused[:, kv_heads:-1], "kv_cache": view, "slot_mapping": slots}


CHECKS = (
    Check(
        write_kv,
        _formula,
        {
            "empty": partial(_make, 0),
            "one token": partial(_make, 1),
            "scattered slots": partial(_make, 37),
            "largest block id": partial(_make, 5, last=True),
            "pages that are not whole rows": partial(_make, 9, kv_heads=1, head_size=80, padding=10),
        },
        mutated="kv_cache",
    ),
)
