import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from quire.weights import weight_tensor
from quire.weights.weight_tensor import (
    BLOCK_FORMATS,
    GGUF_FORMATS,
    UNSUPPORTED_GGUF_FORMATS,
    BlockFormat,
    WeightTensor,
    decode,
)
from tests.weights.gguf_builder import random_rows

FORMATS = list(BLOCK_FORMATS)


def reference(raw: np.ndarray, format_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.dequantize(raw, gguf.GGMLQuantizationType[format_name])


def to_torch(raw: np.ndarray, format_name: str, dtype: torch.dtype) -> torch.Tensor:
    """Decode rows of blocks as a model that runs op by op gets them."""
    return WeightTensor("weight", decode(raw, format_name).shape, format_name, raw).to_torch(dtype)


def assert_same_bits(values: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, signs of zeros included; a NaN may have any payload."""
    assert values.shape == expected.shape
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(values), is_nan)
    assert np.array_equal(values.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (64, 2)])
def test_random_bytes_decode_to_the_bits_of_gguf(format_name: str, shape: tuple[int, int]) -> None:
    raw = random_rows(format_name, *shape, seed=shape[0])
    assert_same_bits(decode(raw, format_name), reference(raw, format_name))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_share_the_rows(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_rows("Q4_K", 37, 5)
    monkeypatch.setattr(weight_tensor, "WEIGHTS_PER_THREAD", 1024)
    monkeypatch.setattr(weight_tensor, "allowed_cpus", lambda: range(num_threads))
    assert_same_bits(decode(raw, "Q4_K"), reference(raw, "Q4_K"))


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_the_rounded_fp32_values(format_name: str, dtype: torch.dtype) -> None:
    raw = random_rows(format_name, 9, 4)
    expected = torch.from_numpy(decode(raw, format_name)).to(dtype)
    assert torch.equal(to_torch(raw, format_name, dtype).nan_to_num(7), expected.nan_to_num(7))


def test_halfway_values_round_to_even() -> None:
    # Between 1 and the next bf16 value 1 + 2^-7, and between that and 1 + 2^-6.
    raw = np.array([[1 + 2**-8, 1 + 2**-7 + 2**-8]], dtype=np.float32).view(np.uint8)
    assert to_torch(raw, "F32", torch.bfloat16).tolist() == [[1.0, 1 + 2**-6]]


def test_plain_values_of_the_same_dtype_share_the_memory() -> None:
    raw = random_rows("F32", 3, 8)
    decoded = to_torch(raw, "F32", torch.float32)
    raw[:] = 0
    assert decoded.count_nonzero() == 0


def test_unaligned_plain_values_are_copied() -> None:
    values = np.arange(6, dtype=np.float32)
    buffer = np.frombuffer(bytearray(b"\0" + values.tobytes()), dtype=np.uint8)
    assert torch.equal(to_torch(buffer[1:].reshape(2, 12), "F32", torch.float32), torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize("item", GGUF_FORMATS.values(), ids=lambda item: item.name)
def test_sizes_and_ids_are_those_of_gguf(item: BlockFormat) -> None:
    kind = gguf.GGMLQuantizationType[item.name]
    assert kind.value == item.gguf_id
    assert gguf.GGML_QUANT_SIZES[kind] == (item.block_len, item.block_bytes)


def test_unsupported_names_are_those_of_gguf() -> None:
    for type_id, name in UNSUPPORTED_GGUF_FORMATS.items():
        assert gguf.GGMLQuantizationType(type_id).name == name


def test_every_type_of_gguf_until_q1_0_is_either_supported_or_named() -> None:
    known = GGUF_FORMATS.keys() | UNSUPPORTED_GGUF_FORMATS.keys()
    assert {kind.value for kind in gguf.GGMLQuantizationType if kind.value <= 41} <= known
