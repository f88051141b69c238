"""Each field of a GGUF header out of range, and arbitrary damage: a typed error, never a hang or a huge allocation."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.errors import ModelFileError, UnsupportedModelError
from quire.weights import gguf_file
from quire.weights.gguf_file import read_gguf
from quire.weights.sources import resolve_source
from quire.weights.weight_tensor import BLOCK_FORMATS
from quire_workshop.gguf.export import from_gguf
from quire_workshop.gguf.quantize import quantize_gguf
from tests.weights.gguf_builder import TinyModel, add_value, random_rows
from tests.weights.gguf_cases import (
    ARRAY,
    BOOL,
    BROKEN,
    DATA,
    STRING,
    UINT32,
    UNSUPPORTED,
    array,
    gguf_bytes,
    key_value,
    string,
    tensor_info,
)


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_broken_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.gguf") as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)


def test_arrays_that_fit_the_file_but_not_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_ARRAY_ITEMS", 100)
    path = tmp_path / "model.gguf"
    halves = [key_value(name, ARRAY, array(STRING, 50, bytes(8 * 50))) for name in "ab"]
    path.write_bytes(gguf_bytes(keys=tuple(halves)))
    assert read_gguf(path).metadata == {"a": [""] * 50, "b": [""] * 50}
    path.write_bytes(gguf_bytes(keys=(*halves, key_value("c", ARRAY, array(0, 1, b"x")))))
    with pytest.raises(ModelFileError, match=r"with 'c' its arrays have 101 items, more than 100"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("type_id", "payload"),
    [(STRING, string("x" * 101)), (ARRAY, array(STRING, 2, string("x" * 100) + string("x" * 101)))],
)
def test_too_long_string_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_id: int, payload: bytes
) -> None:
    monkeypatch.setattr(gguf_file, "MAX_STRING_BYTES", 100)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(keys=(key_value("a", type_id, payload),)))
    with pytest.raises(ModelFileError, match=r"'a'.* has 101 bytes, more than 100"):
        read_gguf(path)


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


def test_descriptions_that_are_not_utf8_are_repaired_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.gguf"
    names = array(STRING, 3, string("a") + string(b"\xe9") + string("ä"))
    path.write_bytes(
        gguf_bytes(
            keys=(
                key_value("general.name", STRING, string(b"Caf\xe9")),
                key_value("general.tags", ARRAY, names),
                key_value("other", STRING, string("x")),
            )
        )
    )
    expected = {"general.name": "Caf\ufffd", "general.tags": ["a", "\ufffd", "ä"], "other": "x"}
    assert read_gguf(path).metadata == expected
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    path.write_bytes(gguf_bytes(keys=(key_value("general.name", STRING, struct.pack("<Q", 2**40)),)))
    with pytest.raises(ModelFileError, match="more than are left"):
        read_gguf(path)


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


def test_whole_model_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    TinyModel(format="Q8_0").write(path)
    file, expected = read_gguf(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        ours = file.tensors[tensor.name]
        assert ours.format.name == tensor.tensor_type.name
        assert ours.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert file.rows(ours).tobytes() == np.ascontiguousarray(tensor.data).tobytes()


def test_file_of_another_kind_says_what_to_pass(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content, said in (
        (b"<html>" * 9, "it is a web page"),
        (b"\x7fELF" * 9, "pass a GGUF file, or a directory with"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=said):
            read_gguf(path)


def write_parts(path: Path) -> list[Path]:
    """A tiny model in three parts, as llama.cpp names them and the gguf package writes them."""
    model = TinyModel()
    writer = gguf.GGUFWriter(path / "model.gguf", model.architecture, split_max_tensors=8)
    for key, value in model.metadata().items():
        add_value(writer, key, value)
    for name, values in model.arrays().items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.glob("*.gguf"))


def test_any_part_of_a_split_file_gives_the_whole_model(tmp_path: Path) -> None:
    whole = TinyModel().write(tmp_path / "whole.gguf")
    expected = read_gguf(tmp_path / "whole.gguf")
    (tmp_path / "parts").mkdir()
    parts = write_parts(tmp_path / "parts")
    assert [part.name for part in parts] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        file = read_gguf(part)
        assert file.path == parts[0]
        assert file.tensors.keys() == whole.keys()
        for name, tensor in file.tensors.items():
            assert np.array_equal(file.rows(tensor), expected.rows(expected.tensors[name])), name
        assert {key: file.metadata[key] for key in expected.metadata} == expected.metadata
    assert resolve_source(str(tmp_path / "parts")).path == parts[0]
    merged = tmp_path / "merged.gguf"
    quantize_gguf(from_gguf(read_gguf(parts[1])), merged, "F16")
    assert read_gguf(merged).tensors.keys() == whole.keys()


@pytest.mark.parametrize(
    "wrong", [(ARRAY, array(UINT32, 1, struct.pack("<I", 2))), (STRING, string("2")), (BOOL, b"\1")]
)
@pytest.mark.parametrize("name", ["count", "no", "tensors.count"])
def test_split_that_is_no_integer_is_named(tmp_path: Path, name: str, wrong: tuple[int, bytes]) -> None:
    for number in range(2):
        values = {"count": 2, "no": number, "tensors.count": 2}
        keys = {key: (UINT32, struct.pack("<I", value)) for key, value in values.items()} | {name: wrong}
        content = gguf_bytes(
            tuple(key_value(f"split.{key}", *value) for key, value in keys.items()), (tensor_info(f"w{number}"),), DATA
        )
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(content)
    with pytest.raises(ModelFileError, match=rf"m-00001-of-00002\.gguf: split\.{name} is .*, not an integer"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_missing_wrong_and_renamed_parts_are_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path)
    content = parts[1].read_bytes()
    parts[1].unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003\.gguf is missing: .* is one of 3 parts"):
        read_gguf(parts[2])
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelFileError, match=r"00002-of-00003\.gguf: not part 2 of 3"):
        read_gguf(parts[0])
    parts[1].write_bytes(content)
    other = parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(
        ModelFileError, match=r"other\.gguf: split.count says one of 3 parts, .* name does not say which"
    ):
        read_gguf(other)
