"""Both formats through one door; the reference for names and layouts is Transformers itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quire.errors import ModelError, ModelFileError
from quire.weights import checkpoint as checkpoint_module
from quire.weights.checkpoint import NUM_TRIES, Checkpoint, open_checkpoint, source_state
from quire.weights.sources import ModelFiles
from tests.weights.gguf_builder import TinyModel


def open_gguf(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles("test", path, "gguf", "local"))


def open_directory(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles("test", path, "hf", "local"))


def load_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: tensor.to_torch(torch.float32) for name, tensor in checkpoint.tensors.items()}


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    TinyModel(format="Q4_1", tied=True).write(path)
    return path.read_bytes()


def test_quantised_weight_gives_its_stored_blocks(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    TinyModel(format="Q4_1").write(path)
    checkpoint = open_gguf(path)
    tensor = checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert (tensor.format, tensor.shape, tensor.num_bytes) == ("Q4_1", (64, 64), 64 * 40)
    assert tensor.raw.shape == (64, 40)
    assert checkpoint.tensors["model.norm.weight"].format == "F32"


def test_parameters_and_bytes_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = TinyModel(tied=True, format="Q8_0").write(path)
    checkpoint = open_gguf(path)
    assert checkpoint.num_parameters == sum(value.size for value in written.values())
    assert checkpoint.num_bytes < 2 * checkpoint.num_parameters
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.generation_config == {"eos_token_id": [2]}
    assert "lm_head.weight" not in checkpoint.tensors


def hugging_face_directory(path: Path, **config: object) -> dict[str, torch.Tensor]:
    path.mkdir(exist_ok=True)
    tensors = {"model.norm.weight": torch.randn(8), "model.embed_tokens.weight": torch.randn(4, 8).bfloat16()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    return tensors


def test_hugging_face_directory(tmp_path: Path) -> None:
    written = hugging_face_directory(tmp_path, hidden_size=8)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    checkpoint = open_directory(tmp_path)
    assert checkpoint.hf_config["hidden_size"] == 8
    assert checkpoint.generation_config == {"temperature": 0.6}
    assert checkpoint.metadata == {}
    assert checkpoint.num_parameters == 40
    for name, value in written.items():
        assert torch.equal(checkpoint.tensors[name].to_torch(torch.float32), value.float())
    assert checkpoint.tensors["model.embed_tokens.weight"].format == "BF16"


def test_random_weights_need_only_the_configuration(tmp_path: Path) -> None:
    hugging_face_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    files = ModelFiles("test", tmp_path, "hf", "local")
    assert open_checkpoint(files, with_tensors=False).tensors == {}
    with pytest.raises(ModelFileError, match="no weights"):
        open_checkpoint(files)


@pytest.mark.parametrize("num_changes", [1, NUM_TRIES])
def test_files_replaced_while_they_are_read_are_read_again_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_changes: int
) -> None:
    tensors, left = hugging_face_directory(tmp_path), [num_changes]
    read = checkpoint_module.read_directory

    def replaced(directory: Path) -> Any:
        found = read(directory)
        if left[0]:
            left[0] -= 1
            tensors["model.norm.weight"] += 1
            save_file(tensors, directory / "new")
            (directory / "new").replace(directory / "model.safetensors")
        return found

    monkeypatch.setattr(checkpoint_module, "read_directory", replaced)
    if num_changes == NUM_TRIES:
        with pytest.raises(ModelFileError, match="changes while it is read"):
            open_directory(tmp_path)
        return
    checkpoint = open_directory(tmp_path)
    assert torch.equal(checkpoint.tensors["model.norm.weight"].to_torch(torch.float32), tensors["model.norm.weight"])
    assert checkpoint.state == source_state(checkpoint.files)


def test_bad_directory_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_directory(tmp_path)
    hugging_face_directory(tmp_path)
    for architectures in ("[]", "null", "[1]", '"LlamaForCausalLM"'):
        (tmp_path / "config.json").write_text(f'{{"architectures": {architectures}}}')
        with pytest.raises(ModelFileError, match="architectures"):
            open_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert open_directory(tmp_path).hf_config == {"model_type": "llama"}
    hugging_face_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ModelFileError, match="generation_config"):
        open_directory(tmp_path)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_damage_to_a_gguf_is_a_typed_error_or_harmless(
    tiny_gguf: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(tiny_gguf)
    # The header is the interesting part; damage to weights cannot be seen.
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, 4000))
        new = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\0" * 8])))
        content[start : start + len(new)] = new
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    message = ""
    try:
        load_all(open_gguf(path))
    except ModelError as error:
        message = str(error)
    assert "\n" not in message


def test_every_truncation_is_a_typed_error(tiny_gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 4000, 97), len(tiny_gguf) - 1]:
        path.write_bytes(tiny_gguf[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            open_gguf(path)
