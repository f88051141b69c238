"""`quire show`: what a model's files say, and one line when they cannot be read."""

from pathlib import Path

import pytest

from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import CONFIG, TEMPLATE, make_tiny_directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("models") / "tiny")


def test_json(tiny: Path) -> None:
    value = parsed(call("show", str(tiny), "--json"))
    assert value["schema"] == "quire.show/1"
    assert value["architectures"] == ["LlamaForCausalLM"]
    assert value["config"]["hidden_size"] == CONFIG["hidden_size"]
    assert value["config"]["max_position_embeddings"] == 128
    assert value["tensor_formats"] == {"F32": {"num_tensors": 20, "num_bytes": value["num_bytes"]}}
    assert value["num_bytes"] == 4 * value["num_parameters"]
    assert value["tokenizer"]["vocab_size"] == 258
    assert value["tokenizer"]["has_chat_template"] is True
    assert "tensors" not in value


def test_text_names_the_main_facts(tiny: Path) -> None:
    result = call("show", str(tiny))
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["architecture"] == "LlamaForCausalLM"
    assert lines["context"] == "128"
    assert lines["origin"] == "local"
    assert "F32 20 tensors" in lines["weights"]


def test_tensors(tiny: Path) -> None:
    text = call("show", str(tiny), "--tensors").stdout
    assert "model.layers.1.mlp.down_proj.weight" in text
    assert "16×32" in text
    listed = parsed(call("show", str(tiny), "--tensors", "--json"))["tensors"]
    assert {"name": "model.norm.weight", "shape": [16], "format": "F32", "num_bytes": 64} in listed


def test_template(tiny: Path) -> None:
    assert call("show", str(tiny), "--template").stdout == TEMPLATE + "\n"


def test_broken_tokenizer_does_not_hide_the_rest(tmp_path: Path) -> None:
    path = make_tiny_directory(tmp_path / "tiny")
    (path / "tokenizer.json").write_text("{")
    value = parsed(call("show", str(path), "--json"))
    assert value["num_parameters"] > 0
    assert "tokenizer.json" in value["tokenizer"]["error"]


def truncated_gguf(path: Path) -> Path:
    path.write_bytes(b"GGUF\x03\x00\x00\x00\x05\x00")
    return path


def test_bad_files_are_one_line_and_exit_3(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.gguf").write_text("not a model")
    cases = {
        tmp_path / "missing.gguf": "missing.gguf",
        tmp_path / "empty": "no model",
        tmp_path / "text.gguf": "text.gguf",
        truncated_gguf(tmp_path / "cut.gguf"): "cut.gguf",
    }
    for path, named in cases.items():
        for verb in ("show", "pull") if path.name in ("missing.gguf", "empty") else ("show",):
            result = call(verb, str(path))
            assert result.exit_code == 3, result.stderr
            assert result.stdout == ""
            assert result.stderr.startswith("error[model_"), result.stderr
            assert result.stderr.count("\n") == 1
            assert named in result.stderr


def test_show_loads_no_torch(tiny: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, quire.cli.main as m\n"
        f"try: m.main(['show', {str(tiny)!r}])\n"
        "except SystemExit as e: print('torch' in sys.modules, e.code, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "False 0"
