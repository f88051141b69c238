"""`Embedding`, as table and as head."""

import torch

from quire.layers.embedding import Embedding


def test_rows_and_scores() -> None:
    table = Embedding(7, 4)
    table.weight.data.normal_()
    ids = torch.tensor([3, 0, 3])
    assert torch.equal(table(ids), table.weight[ids])
    hidden = torch.randn(2, 4)
    torch.testing.assert_close(table.as_head(hidden), hidden @ table.weight.T)
