"""Views of safetensors files hold the bytes that the safetensors package reads; damaged files are typed errors."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load as reference_load
from safetensors.torch import save, save_file

from quire.errors import ModelError, ModelFileError, UnsupportedModelError
from quire.weights.checkpoint import read_directory, read_safetensors

F32_2X2 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def file_bytes(header: Any, data: bytes = bytes(16), *, header_bytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    written = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype), "c": torch.tensor(2.0, dtype=dtype)}
    save_file(written, path, metadata={"format": "pt"})
    tensors = read_safetensors(path)
    assert tensors.keys() == written.keys()
    for name, value in written.items():
        assert tensors[name].shape == tuple(value.shape)
        assert torch.equal(tensors[name].to_torch(dtype), value)
        assert torch.equal(tensors[name].to_torch(torch.float32), value.float())


def test_header_of_odd_length_shifts_the_data(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = torch.arange(4.0)
    for spaces in range(8):
        header = json.dumps({"w": F32_2X2}).encode() + b" " * spaces
        path.write_bytes(file_bytes(header, values.numpy().tobytes()))
        assert torch.equal(read_safetensors(path)["w"].to_torch(torch.float32), values.view(2, 2))


def test_masks_and_counters_are_listed_but_are_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"mask": torch.ones(3, dtype=torch.bool), "ids": torch.arange(4)}, path)
    tensors = read_safetensors(path)
    assert tensors["mask"].shape == (3,)
    with pytest.raises(UnsupportedModelError, match=r"'ids'.*I64.*F32"):
        tensors["ids"].to_torch(torch.float32)


BROKEN = {
    "empty": b"",
    "length cut": b"\1\0\0",
    "length huge": struct.pack("<Q", 2**64 - 1) + b"{}",
    "length past the end": file_bytes({"w": F32_2X2}, header_bytes=1000),
    "not JSON": file_bytes(b"x" * 20),
    "deep": file_bytes(b"[" * 100_000),
    "no dtype": file_bytes({"w": {"shape": [4], "data_offsets": [0, 16]}}),
    "dtype": file_bytes({"w": {**F32_2X2, "dtype": "F31\nline"}}),
    "shape overflow": file_bytes({"w": {**F32_2X2, "shape": [2**62, 4]}}),
    "shape endless": file_bytes({"w": {**F32_2X2, "shape": [2] * 100_000}}),
    "offsets negative": file_bytes({"w": {**F32_2X2, "data_offsets": [-16, 0]}}),
    "offsets outside": file_bytes({"w": {**F32_2X2, "data_offsets": [16, 32]}}),
    "size": file_bytes({"w": {**F32_2X2, "data_offsets": [0, 12]}}),
    "overlap": file_bytes({"a": F32_2X2, "b": F32_2X2}),
    "gap": file_bytes({"a": F32_2X2, "b": {**F32_2X2, "data_offsets": [20, 36]}}, bytes(36)),
    "data cut": file_bytes({"w": F32_2X2}, bytes(15)),
    "data left over": file_bytes({"w": F32_2X2}, bytes(17)),
}


def test_dtype_that_is_newer_than_the_reader_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes({"w": {"dtype": "F4", "shape": [4, 8], "data_offsets": [0, 16]}}))
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors: tensor 'w' has the dtype F4"):
        read_safetensors(path)


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_broken_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors") as caught:
        read_safetensors(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_file_is_refused_or_read_as_the_safetensors_package_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(save({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4).half()}))
    for _ in range(data.draw(st.integers(1, 3))):
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=3), st.sampled_from([b"9", b"-", b"]", b'"', b"F16"])))
        start = data.draw(st.integers(0, len(content) - 1))
        content[start : start + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    try:
        tensors = read_safetensors(path)
    except ModelError:
        return
    try:
        expected = reference_load(bytes(content))
    except SafetensorError as error:
        raise AssertionError(f"accepted what the package refuses: {error}") from error
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].shape == tuple(value.shape)
        assert tensors[name].stored.tobytes() == value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def write_shards(path: Path) -> dict[str, torch.Tensor]:
    written = {"a": torch.randn(2, 2), "b": torch.randn(3), "c": torch.randn(4)}
    save_file({"a": written["a"], "b": written["b"]}, path / "model-00001-of-00002.safetensors")
    save_file({"c": written["c"]}, path / "model-00002-of-00002.safetensors")
    names = {"a": 1, "b": 1, "c": 2}
    weight_map = {name: f"model-0000{number}-of-00002.safetensors" for name, number in names.items()}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return written


def test_shards(tmp_path: Path) -> None:
    written = write_shards(tmp_path)
    tensors = read_directory(tmp_path)
    assert tensors.keys() == written.keys()
    for name, value in written.items():
        assert torch.equal(tensors[name].to_torch(torch.float32), value)


def test_missing_shard_or_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no weights"):
        read_directory(tmp_path)
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002\.safetensors is missing"):
        read_directory(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFileError, match=r"not model\.safetensors\.index\.json"):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "../secret"}},
        {"weight_map": {"a": "/etc/passwd"}}, {"weight_map": {"a": ".."}}, {"weight_map": {"a": ""}},
        {"weight_map": {"zzz": "model-00001-of-00002.safetensors"}}, {"weight_map": {"a": "x\0y"}},
        {"weight_map": {"a": "x" * 10_000}}, {"weight_map": {"a": "\ud800"}},
    ],
)  # fmt: skip
def test_bad_index(tmp_path: Path, index: dict[str, Any]) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=str(tmp_path)):
        read_directory(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(UnsupportedModelError, match=r"pickles.*convert"):
        read_directory(tmp_path)
