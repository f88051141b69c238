"""The mixes of formats, and whole files beside the gguf package's."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants

from quire.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.weights.checkpoint import open_checkpoint
from quire.weights.gguf_file import read_gguf
from quire.weights.sources import ModelFiles
from quire.weights.weight_tensor import BLOCK_FORMATS, quantize
from quire_workshop.gguf.export import from_gguf
from quire_workshop.gguf.quantize import (
    FILE_TYPES,
    ModelToQuantize,
    SourceTensor,
    choose_formats,
    quantize_gguf,
    read_importance,
    write_importance,
)
from tests.weights.gguf_builder import TinyModel
from tests.weights.test_encode import RELATIVE_ERRORS


def source(num_layers: int = 16, width: int = 512, *, tied: bool = False, **sizes: int) -> ModelToQuantize:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (96, width), "output_norm.weight": (width,)}
    shapes |= {} if tied else {"output.weight": (96, width)}
    for layer in range(num_layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down", "ffn_gate_inp"):
            shapes[f"blk.{layer}.{part}.weight"] = (width, width)
    tensors = tuple(
        SourceTensor(name, shape, "F32", lambda first, last: np.zeros(0), lambda: np.zeros(0))
        for name, shape in shapes.items()
    )
    counts = {"num_heads": 8, "num_kv_heads": 2, "num_experts": 0, **sizes}
    return ModelToQuantize({}, tensors, num_layers, **counts)


MORE_BITS = (0, 1, 4, 7, 10, 13, 14, 15)
"""Of 16 layers: the first and the last two, and every third of those between."""


@pytest.mark.parametrize(
    ("file_type", "part", "layers", "there", "elsewhere"),
    [
        ("Q4_K_M", "attn_v", MORE_BITS, "Q6_K", "Q4_K"),
        ("Q4_K_M", "ffn_down", MORE_BITS, "Q6_K", "Q4_K"),
        ("Q4_K_M", "attn_k", (), "", "Q4_K"),
        ("Q4_K_S", "attn_v", (0, 1, 2, 3), "Q5_K", "Q4_K"),
        ("Q4_K_S", "ffn_down", (0, 1), "Q5_K", "Q4_K"),
        ("Q5_K_M", "ffn_down", MORE_BITS, "Q6_K", "Q5_K"),
        ("Q3_K_M", "attn_v", (0, 1), "Q5_K", "Q4_K"),
        ("Q3_K_M", "ffn_down", (0,), "Q5_K", "Q4_K"),
        ("Q3_K_M", "attn_output", (), "", "Q4_K"),
        ("Q3_K_L", "ffn_down", (), "", "Q5_K"),
        ("Q2_K", "attn_v", (), "", "Q4_K"),
        ("Q2_K", "ffn_down", (), "", "Q3_K"),
        ("Q6_K", "ffn_down", (), "", "Q6_K"),
        ("Q8_0", "attn_v", (), "", "Q8_0"),
    ],
)
def test_mixes_are_those_of_llama_cpp(
    file_type: str, part: str, layers: tuple[int, ...], there: str, elsewhere: str
) -> None:
    formats = choose_formats(source(), file_type)
    expected = [there if layer in layers else elsewhere for layer in range(16)]
    assert [formats[f"blk.{layer}.{part}.weight"] for layer in range(16)] == expected
    assert formats["output_norm.weight"] == formats["blk.3.ffn_gate_inp.weight"] == "F32"
    assert formats["output.weight"] == ("Q8_0" if file_type == "Q8_0" else "Q6_K")
    assert formats["token_embd.weight"] == FILE_TYPES[file_type][1]


@pytest.mark.parametrize(
    ("file_type", "usual", "better"),
    [("Q4_K_M", "Q5_0", "Q8_0"), ("Q5_K_M", "Q5_1", "Q8_0"), ("Q6_K", "Q8_0", "Q8_0"), ("Q3_K_M", "Q4_0", "Q5_0")],
)
def test_rows_of_other_lengths_take_formats_of_32(file_type: str, usual: str, better: str) -> None:
    formats = choose_formats(source(width=288, tied=True), file_type)
    assert formats["token_embd.weight"] == "Q8_0"
    assert formats["blk.5.attn_q.weight"] == usual
    assert formats["blk.7.ffn_down.weight"] == better
    assert choose_formats(source(width=24), file_type)["blk.5.attn_q.weight"] == "F16"


def test_mixes_by_number_of_experts_layers_and_importance() -> None:
    experts = choose_formats(source(num_experts=8), "Q4_K_M")
    chosen = [experts[f"blk.5.{part}.weight"] for part in ("attn_v", "attn_k", "attn_output", "attn_q")]
    assert chosen == ["Q8_0", "Q8_0", "Q5_K", "Q4_K"]
    assert choose_formats(source(80), "Q4_K_M")["blk.11.attn_v.weight"] == "Q5_K"
    assert choose_formats(source(80, num_kv_heads=8), "Q4_K_M")["blk.11.attn_v.weight"] == "Q4_K"
    with_importance = choose_formats(source(), "Q4_0", has_importance=True)
    assert [with_importance[f"blk.{layer}.ffn_down.weight"] for layer in (1, 2)] == ["Q4_1", "Q4_0"]
    with pytest.raises(ConfigError, match="Q9_K is unknown; there are F32"):
        choose_formats(source(), "Q9_K")


# --- Files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_type", ["Q4_K_M", "Q8_0", "BF16"])
def test_file_keeps_keys_and_opens_in_both_readers(tmp_path: Path, file_type: str) -> None:
    written, path = tmp_path / "source.gguf", tmp_path / "quantised.gguf"
    changes = {"general.alignment": 64, "llama.rope.scaling.finetuned": False, "tokenizer.ggml.scores": [0.5, -1.0]}
    values = TinyModel(tied=True, changes=changes).write(written)
    formats = quantize_gguf(from_gguf(read_gguf(written)), path, file_type)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {tensor.name: tensor.tensor_type.name for tensor in theirs.tensors} == formats
    before = read_gguf(written).metadata
    assert {key: ours.metadata[key] for key in before} == before
    assert ours.metadata["general.file_type"] == FILE_TYPES[file_type][0]
    assert ours.metadata["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    for tensor in theirs.tensors:
        found = quants.dequantize(tensor.data, tensor.tensor_type)
        difference = np.abs(found - values[tensor.name].reshape(found.shape))
        assert difference.max() <= (0.25 if file_type == "Q4_K_M" else 0.02)
    assert open_checkpoint(ModelFiles("tiny", path, "gguf", "local")).tensors
    assert [item.name for item in tmp_path.iterdir() if item.suffix == ".part"] == []


def test_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    written = tmp_path / "source.gguf"
    TinyModel().write(written)
    with pytest.raises(ModelFileError, match="cannot be written: No such file"):
        quantize_gguf(from_gguf(read_gguf(written)), tmp_path / "absent" / "out.gguf", "Q8_0")


def test_stacks_of_experts_use_the_importance_of_each(tmp_path: Path) -> None:
    stack = np.random.default_rng(1).standard_normal((3, 4, 64)).astype(np.float32)
    rows = stack.reshape(12, 64)
    name = "blk.0.ffn_up_exps.weight"
    tensor = SourceTensor(name, stack.shape, "F32", lambda first, last: rows[first:last], lambda: rows.view(np.uint8))
    importance = np.random.default_rng(2).uniform(0.1, 9, 3 * 64).astype(np.float32)
    quantize_gguf(ModelToQuantize({}, (tensor,), 1, 4, 4, 3), tmp_path / "out.gguf", "Q4_0", {name: importance})
    file = read_gguf(tmp_path / "out.gguf")
    expected = [quantize(stack[index], "Q4_0", importance[64 * index : 64 * (index + 1)]) for index in range(3)]
    assert np.array_equal(file.rows(file.tensors[name]), np.concatenate(expected))
    with pytest.raises(UnsupportedModelError, match=r"128 columns for 'blk.0.ffn_up_exps.weight', which has 64"):
        quantize_gguf(ModelToQuantize({}, (tensor,), 1, 4, 4, 3), tmp_path / "b.gguf", "Q4_0", {name: importance[:128]})


# --- Importance matrices ----------------------------------------------------------------------


def test_importance_is_read_as_written_and_as_llama_cpp_wrote_it(tmp_path: Path) -> None:
    means = {"blk.0.attn_q.weight": np.arange(8, dtype=np.float32), "blk.0.ffn_up.weight": np.ones(4, np.float32)}
    path = tmp_path / "importance.gguf"
    write_importance(path, means, "text.txt", num_tokens=1024, window_len=512)
    assert gguf.GGUFReader(path).fields["imatrix.chunk_count"].contents() == 2
    content = struct.pack("<i", len(means))
    for name, values in means.items():
        content += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, len(values))
        content += (4 * values).tobytes()
    legacy = tmp_path / "importance.dat"
    legacy.write_bytes(content)
    for each in (path, legacy):
        found = read_importance(each)
        assert found.keys() == means.keys()
        assert all(np.array_equal(found[name], values) for name, values in means.items())
    for broken in (content[:-3], struct.pack("<i", 9), content[:4] + b"\xff" * 40, struct.pack("<i", 0)):
        legacy.write_bytes(broken)
        with pytest.raises(ModelFileError, match=r"importance\.dat: no importance matrix"):
            read_importance(legacy)


def test_importance_below_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "importance.gguf"
    write_importance(path, {"a": np.array([1.0, -1.0], np.float32)}, "text", num_tokens=512, window_len=512)
    with pytest.raises(ModelFileError, match="'a' has values below 0"):
        read_importance(path)


def test_every_quantised_format_has_a_quantiser() -> None:
    wanted = {format_name for _, format_name in FILE_TYPES.values()} - {"F32", "F16", "BF16"}
    assert wanted == RELATIVE_ERRORS.keys()
    assert wanted <= BLOCK_FORMATS.keys()
