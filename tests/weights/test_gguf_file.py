"""Each field of a GGUF header out of range, and arbitrary damage: a typed error, never a hang or a huge allocation."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.errors import ModelFileError, UnsupportedModelError
from quire.weights.block_formats import BLOCK_FORMATS
from quire.weights.gguf_file import read_gguf
from tests.weights.gguf_builder import (
    ARRAY,
    BOOL,
    STRING,
    UINT32,
    TinyModel,
    gguf_bytes,
    key_value,
    random_rows,
    string,
    tensor_info,
)  # fmt: skip

HUGE = 2**63
U32_7 = struct.pack("<I", 7)
DATA = bytes(256)


def array(type_id: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", type_id, count) + payload


BROKEN = {
    "empty": b"",
    "only magic": b"GGUF",
    "magic": gguf_bytes(magic=b"GGUX"),
    "zip": b"PK\x03\x04" + bytes(100),
    "page": b"<!DOCTYPE html><html>",
    "version cut": b"GGUF\x03\0",
    "counts cut": b"GGUF" + struct.pack("<IQ", 3, 0),
    "tensor count": gguf_bytes(num_tensors=HUGE),
    "tensor count by one": gguf_bytes(tensors=(tensor_info(),), data=DATA, num_tensors=2),
    "key count": gguf_bytes(num_keys=HUGE),
    "key count by one": gguf_bytes(keys=(key_value("a", UINT32, U32_7),), num_keys=2),
    "key length": gguf_bytes(keys=(struct.pack("<Q", HUGE) + b"a" + bytes(20),)),
    "key empty": gguf_bytes(keys=(key_value("", UINT32, U32_7),)),
    "key too long": gguf_bytes(keys=(key_value("k" * 65536, UINT32, U32_7),)),
    "key not UTF-8": gguf_bytes(keys=(key_value(b"\xff\xfe", UINT32, U32_7),)),
    "key twice": gguf_bytes(keys=(key_value("a", UINT32, U32_7),) * 2),
    "value type": gguf_bytes(keys=(key_value("a", 13, U32_7),)),
    "value type huge": gguf_bytes(keys=(key_value("a", 2**32 - 1, U32_7),)),
    "value cut": gguf_bytes(keys=(key_value("a", 10, b"\1"),), alignment=1),
    "bool": gguf_bytes(keys=(key_value("a", BOOL, b"\2"),)),
    "bool in array": gguf_bytes(keys=(key_value("a", ARRAY, array(BOOL, 2, b"\1\2")),)),
    "string length": gguf_bytes(keys=(key_value("a", STRING, struct.pack("<Q", HUGE)),)),
    "string length by one": gguf_bytes(keys=(key_value("a", STRING, struct.pack("<Q", 2) + b"x"),), alignment=1),
    "string not UTF-8": gguf_bytes(keys=(key_value("a", STRING, string(b"\x80")),)),
    "array type": gguf_bytes(keys=(key_value("a", ARRAY, array(77, 1, U32_7)),)),
    "array length": gguf_bytes(keys=(key_value("a", ARRAY, array(UINT32, HUGE, U32_7)),)),
    "array length overflow": gguf_bytes(keys=(key_value("a", ARRAY, array(UINT32, 2**62, U32_7)),)),
    "strings": gguf_bytes(keys=(key_value("a", ARRAY, array(STRING, HUGE, string("x"))),)),
    "strings by one": gguf_bytes(keys=(key_value("a", ARRAY, array(STRING, 2, string("x"))),), alignment=1),
    "strings length": gguf_bytes(keys=(key_value("a", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE))),)),
    "strings not UTF-8": gguf_bytes(keys=(key_value("a", ARRAY, array(STRING, 1, string(b"\xc3"))),)),
    "alignment zero": gguf_bytes(keys=(key_value("general.alignment", UINT32, struct.pack("<I", 0)),)),
    "alignment odd": gguf_bytes(keys=(key_value("general.alignment", UINT32, struct.pack("<I", 24)),)),
    "alignment type": gguf_bytes(keys=(key_value("general.alignment", STRING, string("32")),)),
    "alignment bool": gguf_bytes(keys=(key_value("general.alignment", BOOL, b"\1"),)),
    "alignment huge": gguf_bytes(
        keys=(key_value("general.alignment", UINT32, struct.pack("<I", 2**31)),), tensors=(tensor_info(),), data=DATA
    ),
    "name empty": gguf_bytes(tensors=(tensor_info(name=""),), data=DATA),
    "name length": gguf_bytes(tensors=(struct.pack("<Q", HUGE) + bytes(60),), data=DATA),
    "name not UTF-8": gguf_bytes(tensors=(tensor_info(name=b"\xff"),), data=DATA),
    "name twice": gguf_bytes(tensors=(tensor_info(), tensor_info(offset=256)), data=DATA * 2),
    "no dimensions": gguf_bytes(tensors=(tensor_info(dimensions=()),), data=DATA),
    "five dimensions": gguf_bytes(tensors=(tensor_info(dimensions=(32, 1, 1, 1, 1)),), data=DATA),
    "dimension count": gguf_bytes(tensors=(tensor_info(num_dimensions=2**32 - 1),), data=DATA),
    "dimension zero": gguf_bytes(tensors=(tensor_info(dimensions=(32, 0)),), data=DATA),
    "dimension huge": gguf_bytes(tensors=(tensor_info(dimensions=(32, HUGE)),), data=DATA),
    "dimension product": gguf_bytes(tensors=(tensor_info(dimensions=(2**32, 2**32, 2**32, 2**32)),), data=DATA),
    "tensor type": gguf_bytes(tensors=(tensor_info(type_id=4),), data=DATA),
    "tensor type huge": gguf_bytes(tensors=(tensor_info(type_id=2**32 - 1),), data=DATA),
    "block not whole": gguf_bytes(tensors=(tensor_info(dimensions=(33, 2), type_id=3),), data=DATA),
    "offset unaligned": gguf_bytes(tensors=(tensor_info(offset=8),), data=DATA * 2),
    "offset outside": gguf_bytes(tensors=(tensor_info(offset=1 << 20),), data=DATA),
    "offset huge": gguf_bytes(tensors=(tensor_info(offset=2**64 - 32),), data=DATA),
    "overlap": gguf_bytes(tensors=(tensor_info("a"), tensor_info("b", offset=224)), data=DATA * 2),
    "data cut": gguf_bytes(tensors=(tensor_info(),), data=DATA[:-1]),
    "data absent": gguf_bytes(tensors=(tensor_info(),)),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_broken_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.gguf") as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)


UNSUPPORTED = {
    "version 1": (gguf_bytes(version=1), "version 1"),
    "version 4": (gguf_bytes(version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "nested array": (gguf_bytes(keys=(key_value("a", ARRAY, array(ARRAY, 1, bytes(12))),)), "array of arrays"),
    "IQ2_XXS": (gguf_bytes(tensors=(tensor_info(type_id=16),), data=DATA), "IQ2_XXS.*Q4_K"),
    "split": (
        gguf_bytes(keys=(key_value("split.count", 2, struct.pack("<H", 3)),)),
        "llama-gguf-split --merge",
    ),
}


@pytest.mark.parametrize(("content", "message"), UNSUPPORTED.values(), ids=list(UNSUPPORTED))
def test_valid_but_unsupported(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf(path)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(tensors=(tensor_info(),), data=DATA, version=version))
    file = read_gguf(path)
    assert file.version == version
    assert file.tensors["w"].shape == (2, 32)
    assert file.rows(file.tensors["w"]).shape == (2, 128)


def test_every_value_type_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63 + 1)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "héllo 世界\n")
    writer.add_string("empty", "")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, 0.25])
    writer.add_array("flags", [True, False])
    writer.add_array("words", ["", "a", "\0", "世界", "x" * 300])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = {key: item.contents() for key, item in gguf.GGUFReader(path).fields.items() if "GGUF." not in key}
    metadata = read_gguf(path).metadata
    assert metadata == expected
    assert metadata["yes"] is True
    assert metadata["flags"] == [True, False]
    assert metadata["words"][2:4] == ["\0", "世界"]


def test_empty_arrays(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    keys = (key_value("a", ARRAY, array(STRING, 0, b"")), key_value("b", ARRAY, array(BOOL, 0, b"")))
    path.write_bytes(gguf_bytes(keys=keys))
    assert read_gguf(path).metadata == {"a": [], "b": []}


@pytest.mark.parametrize("alignment", [1, 8, 32, 256])
@pytest.mark.parametrize("format_name", list(BLOCK_FORMATS))
def test_tensors_of_every_format_and_alignment(tmp_path: Path, format_name: str, alignment: int) -> None:
    path = tmp_path / "model.gguf"
    item = BLOCK_FORMATS[format_name]
    first, second = random_rows(format_name, 3, 2), random_rows(format_name, 2, 1, seed=1)
    padding = bytes(-first.size % alignment)
    infos = (
        tensor_info("b", (item.block_len * 2, 3), item.gguf_id, 0),
        tensor_info("a", (item.block_len, 2), item.gguf_id, first.size + len(padding)),
    )
    keys = (key_value("general.alignment", UINT32, struct.pack("<I", alignment)),)
    data = first.tobytes() + padding + second.tobytes()
    path.write_bytes(gguf_bytes(keys, infos, data, alignment=alignment))
    file = read_gguf(path)
    assert file.tensors["b"].shape == (3, 2 * item.block_len)
    assert np.array_equal(file.rows(file.tensors["b"]), first)
    assert np.array_equal(file.rows(file.tensors["a"]), second)


def test_a_whole_model_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    TinyModel(format="Q8_0").write(path)
    file, expected = read_gguf(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        ours = file.tensors[tensor.name]
        assert ours.format.name == tensor.tensor_type.name
        assert ours.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert file.rows(ours).tobytes() == np.ascontiguousarray(tensor.data).tobytes()


@pytest.mark.model
def test_smollm2_reads_as_the_gguf_package_reads_it(smollm2_path: Path) -> None:
    file, expected = read_gguf(smollm2_path), gguf.GGUFReader(smollm2_path)
    fields = {key: item.contents() for key, item in expected.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == fields
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(file.tensors) == len(expected.tensors) == 272
