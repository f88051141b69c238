"""`quire show`: the facts of a model's files, and one line when they cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ModelRegistry
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
    result = call("show", tiny, "--template")
    assert result.stdout == TEMPLATE + "\n"
    assert "default: calls are read as generic" in result.stderr
    assert "  tools = null" in result.stderr
    (found,) = parsed(call("show", tiny, "--template", "--json"))["templates"].values()
    assert (found["source"], found["call_format"], found["traits"]["system"]) == (TEMPLATE, "generic", True)


def test_broken_tokenizer_does_not_hide_the_rest(tmp_path: Path) -> None:
    path = make_tiny_directory(tmp_path / "tiny")
    (path / "tokenizer.json").write_text("{")
    value = parsed(call("show", str(path), "--json"))
    assert value["num_parameters"] > 0
    assert "tokenizer.json" in value["tokenizer"]["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "Quire's own model, on CPUs as a plan"),
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        ({"hidden_act": "cosine"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"new_attention": "linear"}, "new_attention"),
        ({"intermediate_size": 48}, "configuration and weights do not belong together"),
        ({"num_hidden_layers": 3}, "lacks tensors"),
    ],
)
def test_model_that_would_not_load_has_the_error_of_loading(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = make_tiny_directory(tmp_path / "tiny")
    (path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    shown = parsed(call("show", str(path), "--json"))["implementation"]
    assert words in shown
    result = call("run", str(path), "hi")
    assert (result.exit_code, result.stdout) == (3, "")
    assert shown.removeprefix("none: ") in result.stderr


def test_model_that_no_plan_can_hold_is_named(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clamped(LlamaForCausalLM):
        def forward(self, token_ids: Any, batch: Any) -> Any:
            return super().forward(token_ids, batch).clamp(-1, 1)

    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": Clamped})
    assert "quire, op by op: a plan cannot hold" in parsed(call("show", tiny, "--json"))["implementation"]
