"""`Linear` and `pack_weights`."""

from typing import Any

import pytest
import torch

from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.nn import ModuleList
from quire.runtime.eager import give_memory, pack_weights


def with_memory(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Give a model random weights."""

    def allocate(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        return torch.randn(shape).mul(0.1).to(**options)

    return give_memory(model, dtype, torch.device("cpu"), allocate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packing_changes_no_output(dtype: torch.dtype) -> None:
    """Also where there is no packed layout for the type, and leaves other layers alone."""
    model = with_memory(ModuleList([Linear(64, 48, bias=True), Linear(48, 32)]), dtype)
    x = torch.randn(7, 64).to(dtype)
    before = model[1](model[0](x))
    pack_weights(model)
    tolerance = 4 * torch.finfo(dtype).eps
    assert (model[1](model[0](x)) - before).abs().max() <= tolerance * before.abs().max()


def test_packing_leaves_embeddings_readable() -> None:
    table = with_memory(Embedding(10, 4))
    pack_weights(ModuleList([table]))
    assert table.weight.layout == torch.strided


def test_packing_twice_is_packing_once() -> None:
    layer = with_memory(Linear(64, 32))
    x = torch.randn(2, 64)
    expected = layer(x)
    pack_weights(layer)
    pack_weights(layer)
    torch.testing.assert_close(layer(x), expected)
