"""Write new keys and values into the paged KV cache. Next to read: `reference.py`, the definition."""

import torch

from quire.kernels.registry import Kernel
from quire.kernels.write_kv import reference

KERNEL = Kernel("write_kv", "write_kv", {"reference": reference.write_kv}, preferred={"*": "reference"})


def write_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store each token's key and value in its slot.

    kv_cache[slot // B, 0, slot % B] = k[t];  kv_cache[slot // B, 1, slot % B] = v[t];  slot = slot_mapping[t]

    Shapes: k, v [T, K, D] (may be strided over T); kv_cache [N, 2, B, K, D] (may be strided over N);
        slot_mapping [T], no slot twice.
    Dtypes: k, v bf16, fp16 or fp32; kv_cache any of these, values are rounded to it; slot_mapping int64.
    Mutates: kv_cache.
    """
    KERNEL.on(k.device.type)(k, v, kv_cache, slot_mapping)
