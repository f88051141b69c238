"""Write new keys and values into the paged KV cache; plans do it natively. Next to read: `paged_attention/`."""

from quire.kernels.registry import kernel
from quire.lazy_torch import Tensor


@kernel.with_traits(writes_cache=True, takes_in=("rope", "rms_norm"))
def write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot.

    kv_cache[slot // B, 0, slot % B] = k[t];  kv_cache[slot // B, 1, slot % B] = v[t];  slot = slot_mapping[t]

    Shapes: k, v [T, K, D] (may be strided over T); kv_cache [N, 2, B, K, D] (may be strided over N);
        slot_mapping [T], no slot twice.
    Dtypes: k, v bf16, fp16 or fp32; kv_cache any of these, values are rounded to it; slot_mapping int64.
    Mutates: kv_cache.
    """
    blocks, offsets = slot_mapping // kv_cache.shape[2], slot_mapping % kv_cache.shape[2]
    kv_cache[blocks, 0, offsets] = k.to(kv_cache.dtype)
    kv_cache[blocks, 1, offsets] = v.to(kv_cache.dtype)
