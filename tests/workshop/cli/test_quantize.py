"""`quire quantize` on a tiny directory: the file, its tokenizer, importance matrices and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.cli.models import open_model
from quire.cli.terminal import Output
from quire.engine.tokenizer_source import load_tokenizer
from quire.weights.gguf_file import read_gguf
from quire_workshop.gguf.export import from_gguf
from quire_workshop.gguf.quantize import quantize_gguf, read_importance
from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import CONFIG, make_tiny_directory, tensor_shapes

SAMPLING = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a model with rows of 32 weights and more."""
    sizes = {"hidden_size": 32, "intermediate_size": 256, "max_position_embeddings": 1024}
    path = make_tiny_directory(tmp_path_factory.mktemp("models") / "wide", **sizes)
    generator = np.random.default_rng(0)
    shapes = tensor_shapes({**CONFIG, **sizes})
    weights = {name: generator.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors")
    (path / "generation_config.json").write_text(json.dumps(SAMPLING))
    return str(path)


@pytest.mark.parametrize("file_type", ["q4_k_m", "Q4_K"])
def test_directory_becomes_a_file_with_the_same_model(wide: str, tmp_path: Path, file_type: str) -> None:
    out = tmp_path / "model.gguf"
    value = parsed(call("quantize", wide, str(out), "--type", file_type, "--json"))
    assert value["type"] == "Q4_K_M"
    assert value["tensor_formats"]["blk.0.ffn_down.weight"] in ("Q4_K", "Q6_K")
    assert value["tensor_formats"]["blk.0.attn_q.weight"] == "Q5_0"
    assert value["num_bytes"] == out.stat().st_size
    ours, source = open_model(str(out), None, Output()), open_model(wide, None, Output())
    assert ours.tensors.keys() == source.tensors.keys()
    for name, tensor in ours.tensors.items():
        expected = source.tensors[name].to_numpy()
        assert np.abs(tensor.to_numpy() - expected).max() <= 0.08 * np.abs(expected).max(), name
    found, expected = load_tokenizer(ours), load_tokenizer(source)
    assert found.encode("Hello wörld 123 </s>") == expected.encode("Hello wörld 123 </s>")
    assert found.chat_template == expected.chat_template
    assert (found.bos_token_id, found.eos_token_id) == (256, 257)
    assert {name: ours.generation_config.get(name) for name in SAMPLING} == SAMPLING


def test_sampling_that_an_alias_recommends_is_written_where_the_file_has_none(wide: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    call("quantize", wide, str(first), "--type", "F16")
    quantize_gguf(from_gguf(read_gguf(first), {"temperature": 0.9, "repetition_penalty": 1.1}), second, "Q8_0")
    found = open_model(str(second), None, Output()).generation_config
    assert {name: found.get(name) for name in (*SAMPLING, "repetition_penalty")} == {
        **SAMPLING, "repetition_penalty": 1.1
    }  # fmt: skip


def test_importance_matrix_is_measured_written_and_read(wide: str, tmp_path: Path) -> None:
    text, matrix = tmp_path / "text.txt", tmp_path / "importance.gguf"
    text.write_text("Sphinx of black quartz, judge my vow. " * 40)
    first, second, plain = (tmp_path / f"{name}.gguf" for name in "abc")
    command = ("quantize", wide, "--type", "Q4_0")
    assert call(*command, str(first), "--imatrix-text", str(text), "--imatrix", str(matrix)).exit_code == 0
    assert call(*command, str(second), "--imatrix", str(matrix)).exit_code == 0
    assert call(*command, str(plain)).exit_code == 0
    importance = read_importance(matrix)
    layers = [f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in (
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")]  # fmt: skip
    assert set(importance) == set(layers)
    assert np.array_equal(importance["blk.0.attn_q.weight"], importance["blk.0.attn_v.weight"])
    assert importance["blk.1.ffn_down.weight"].shape == (256,)
    tensors = [open_model(str(path), None, Output()).tensors for path in (first, second, plain)]
    name = "model.layers.1.mlp.gate_proj.weight"
    values = [each[name].to_numpy() for each in tensors]
    assert np.allclose(values[0], values[1], atol=1e-2)
    assert not np.array_equal(values[0], values[2])
