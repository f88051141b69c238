"""`Linear` and `pack_weights`."""

import pytest
import torch
from torch import nn

from quire.layers.embedding import Embedding
from quire.layers.linear import Linear, pack_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_changes_no_output(dtype: torch.dtype) -> None:
    """Also where there is no packed layout for the type, and leaves other layers alone."""
    model = nn.Sequential(Linear(64, 48, bias=True), Linear(48, 32))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape).mul(0.1).to(dtype)
    x = torch.randn(7, 64).to(dtype)
    before = model(x)
    pack_weights(model)
    tolerance = 4 * torch.finfo(dtype).eps
    assert (model(x) - before).abs().max() <= tolerance * before.abs().max()


def test_packing_leaves_embeddings_readable() -> None:
    table = Embedding(10, 4)
    pack_weights(nn.Sequential(table))
    assert table.weight.layout == torch.strided


def test_packing_twice_is_packing_once() -> None:
    layer = Linear(64, 32)
    layer.weight.data.normal_()
    x = torch.randn(2, 64)
    expected = layer(x)
    pack_weights(layer)
    pack_weights(layer)
    torch.testing.assert_close(layer(x), expected)
