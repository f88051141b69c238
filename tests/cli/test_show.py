"""`quire show`: the facts of a model's files, and one line when they cannot be read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import CONFIG, TEMPLATE, make_tiny_directory


def test_json(tiny: str) -> None:
    value = parsed(call("show", tiny, "--json"))
    assert value["schema"] == "quire.show/1"
    assert value["architectures"] == ["LlamaForCausalLM"]
    assert value["config"]["hidden_size"] == CONFIG["hidden_size"]
    assert value["tensor_formats"] == {"F32": {"num_tensors": 20, "num_bytes": value["num_bytes"]}}
    assert value["num_bytes"] == 4 * value["num_parameters"]
    assert (value["tokenizer"]["vocab_size"], value["tokenizer"]["has_chat_template"]) == (258, True)
    assert "tensors" not in value


def test_tensors_and_template(tiny: str) -> None:
    text = call("show", tiny, "--tensors").stdout
    assert "model.layers.1.mlp.down_proj.weight" in text
    assert "16×32" in text
    listed = parsed(call("show", tiny, "--tensors", "--json"))["tensors"]
    assert {"name": "model.norm.weight", "shape": [16], "format": "F32", "num_bytes": 64} in listed
    assert call("show", tiny, "--template").stdout == TEMPLATE + "\n"


def test_broken_tokenizer_does_not_hide_the_rest(tmp_path: Path) -> None:
    path = make_tiny_directory(tmp_path / "tiny")
    (path / "tokenizer.json").write_text("{")
    value = parsed(call("show", str(path), "--json"))
    assert value["num_parameters"] > 0
    assert "tokenizer.json" in value["tokenizer"]["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "Quire's own model"),
        ({"model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}, "Transformers' own module, op by op"),
        (
            {"model_type": "bloom", "architectures": ["BloomForCausalLM"]},
            "none: Transformers' own module for bloom models cannot be used here",
        ),
        ({"model_type": "new", "architectures": ["NewForCausalLM"]}, "none: architecture NewForCausalLM is not"),
    ],
)
def test_implementation_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = make_tiny_directory(tmp_path / "tiny")
    (path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert f"computed by      {words}" in call("show", str(path)).stdout


def test_show_loads_no_torch(tiny: str) -> None:
    code = (
        "import sys, quire.cli.main as m\n"
        f"try: m.main(['show', {tiny!r}])\n"
        "except SystemExit as e: print('torch' in sys.modules, e.code, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "False 0"
