import numpy as np
import pytest
import torch

from quire.errors import UnsupportedModelError
from quire.weight_map import Offset
from quire.weights.weight_tensor import BLOCK_FORMATS, WeightTensor
from tests.weights.gguf_builder import random_rows


def test_reordered_rows_keep_their_blocks() -> None:
    stored = random_rows("Q8_0", 4, 2)
    order = np.array([2, 0, 3, 1])
    tensor: WeightTensor = WeightTensor("w", (4, 64), "Q8_0", stored, order)
    assert np.array_equal(tensor.raw, stored[order])
    plain = WeightTensor("w", (4, 64), "Q8_0", stored).to_torch(torch.float32)
    assert torch.equal(tensor.to_torch(torch.float32).nan_to_num(), plain[order].nan_to_num())
    assert tensor.num_bytes == 4 * 68


def test_reordered_vector() -> None:
    stored = np.array([[1, 2, 3]], dtype=np.float32).view(np.uint8)
    tensor = WeightTensor("b", (3,), "F32", stored, np.array([2, 0, 1]))
    assert tensor.to_torch(torch.float32).tolist() == [3, 1, 2]
    assert tensor.raw.shape == (1, 12)


def test_offset_is_added_before_rounding_and_kept_by_parts() -> None:
    stored = np.array([[0.001, 0.5, -1.0]], dtype=np.float32).view(np.uint8)
    tensor = WeightTensor("norm", (3,), "F32", stored).viewed([Offset(1.0)])
    assert tensor.to_torch(torch.float32).tolist() == [np.float32(0.001) + np.float32(1), 1.5, 0.0]
    assert tensor.to_torch(torch.bfloat16).tolist() == [1.0, 1.5, 0.0]
    assert tensor.part(slice(1, 3), slice(None)).to_torch(torch.float32).tolist() == [1.5, 0.0]
    assert tensor.viewed([Offset(-1.0)]).to_torch(torch.float32).tolist() == [np.float32(0.001), 0.5, -1.0]


def test_orders_of_rows_compose() -> None:
    stored = np.array([[10, 11, 12]], dtype=np.float32).view(np.uint8)
    tensor = WeightTensor("b", (3,), "F32", stored, np.array([2, 0, 1])).with_rows(np.array([1, 2, 0]))
    assert tensor.to_torch(torch.float32).tolist() == [10, 11, 12]


def test_rows_in_stored_order_are_not_copied() -> None:
    stored = random_rows("F16", 2, 8)
    assert WeightTensor("w", (2, 8), "F16", stored).raw is stored


def test_decoded_tensor_has_the_stored_shape() -> None:
    stored = random_rows("BF16", 6, 5)
    assert WeightTensor("w", (2, 3, 5), "BF16", stored).to_torch(torch.bfloat16).shape == (2, 3, 5)
    assert WeightTensor("s", (), "BF16", stored[:1, :2]).to_torch(torch.float32).shape == ()
    assert WeightTensor("e", (0, 5), "BF16", stored[:0]).to_torch(torch.float32).shape == (0, 5)
    assert WeightTensor("e", (6, 0), "BF16", stored[:, :0]).to_torch(torch.float32).shape == (6, 0)


def test_formats_that_are_no_weights_are_refused_when_read() -> None:
    tensor = WeightTensor("model.mask", (2,), "I64", np.zeros((1, 16), np.uint8))
    with pytest.raises(UnsupportedModelError, match=r"model\.mask.*I64"):
        tensor.to_torch(torch.float32)


@pytest.mark.parametrize("format_name", list(BLOCK_FORMATS))
@pytest.mark.parametrize("is_reordered", [False, True])
def test_part_of_a_matrix_is_the_slice_of_its_values(format_name: str, is_reordered: bool) -> None:
    width = BLOCK_FORMATS[format_name].block_len
    order = np.array([2, 0, 3, 1, 4]) if is_reordered else None
    tensor = WeightTensor("w", (5, 4 * width), format_name, random_rows(format_name, 5, 4), order)
    part = tensor.part(slice(1, 4), slice(width, 3 * width))
    expected = tensor.to_torch(torch.float32)[1:4, width : 3 * width]
    assert part.shape == (3, 2 * width)
    assert part.num_bytes == tensor.num_bytes * 6 // 20
    assert np.shares_memory(part.stored, tensor.stored)
    assert torch.equal(part.to_torch(torch.float32).nan_to_num(), expected.nan_to_num())


def test_part_of_a_vector() -> None:
    stored = np.arange(6, dtype=np.float32).view(np.uint8).reshape(1, -1)
    order = np.array([5, 4, 3, 2, 1, 0])
    for tensor, expected in (
        (WeightTensor("b", (6,), "F32", stored), [2, 3]),
        (WeightTensor("b", (6,), "F32", stored, order), [3, 2]),
    ):
        assert tensor.part(slice(2, 4), slice(None)).to_torch(torch.float32).tolist() == expected
