"""`Attention`: writes the step's keys and values of its own layer, then attends by its own scale, window and group."""

import torch

from quire.kernels.paged_attention import paged_attention
from quire.layers.attention import Attention
from quire.layers.forward_batch import ForwardBatch


def make_batch(num_tokens: int = 6) -> ForwardBatch:
    """One prompt in blocks 4 and 2 (group 0), 1 and 3 (group 1); two layers, one per group."""
    tables = (torch.tensor([[4, 2]], dtype=torch.int32), torch.tensor([[1, 3]], dtype=torch.int32))
    positions = torch.arange(num_tokens)
    pool = torch.full((5, 2, 2, 4, 2, 8), torch.nan)
    return ForwardBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=positions,
        block_tables=tables,
        slot_mapping=tuple(table[0].long()[positions // 4] * 4 + positions % 4 for table in tables),
        kv_caches=(pool[:, 0], pool[:, 1]),
        layer_groups=(0, 1),
        query_lens_list=(num_tokens,),
        seq_lens_list=(num_tokens,),
    )


def test_writes_only_its_own_slots() -> None:
    batch = make_batch()
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    Attention(1, 8)(q, k, v, batch)
    assert batch.kv_caches[0].isnan().all()
    cache = batch.kv_caches[1]
    assert torch.equal(cache[1, 0], k[:4])
    assert torch.equal(cache[3, 1, :2], v[4:])
    written = ~cache.isnan().all(-1).all(-1)  # [N, 2, B]
    assert int(written.sum()) == 12


def test_attends_with_its_group_scale_and_window() -> None:
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    for layer_index, scale, window in ((0, None, None), (1, 0.3, None), (1, None, 2)):
        batch = make_batch()
        found = Attention(layer_index, 8, scale=scale, window=window)(q, k, v, batch)
        expected = paged_attention(q, batch.kv_caches[layer_index], batch, layer_index, scale or 8**-0.5, window)
        torch.testing.assert_close(found, expected)
