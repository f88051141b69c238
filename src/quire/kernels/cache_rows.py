"""A layer's KV cache seen as rows of one token: the view through which `write_kv` and `paged_attention` address it.

A block starts every `rows_per_block` rows: B rows of keys, then B of values, then the rows of other layers.
Next to read: `write_kv/batched.py`.
"""

import torch


def rows_per_block(kv_cache: torch.Tensor) -> int | None:
    """Rows from one block to the next; None where another group's layers make that no whole number of rows.

    Shapes: kv_cache [N, 2, B, K, D], which may be strided over N.
    """
    rows, rest = divmod(kv_cache.stride(0), kv_cache.shape[3] * kv_cache.shape[4])
    return None if rest else rows


def as_rows(kv_cache: torch.Tensor, rows_per_block: int) -> torch.Tensor:
    """The rows, without a copy. Shapes: kv_cache [N, 2, B, K, D] -> [(N - 1) · rows_per_block + 2·B, K, D]."""
    num_blocks, planes, block_size, num_kv_heads, head_size = kv_cache.shape
    num_rows = (num_blocks - 1) * rows_per_block + planes * block_size
    return kv_cache.as_strided((num_rows, num_kv_heads, head_size), (num_kv_heads * head_size, head_size, 1))
