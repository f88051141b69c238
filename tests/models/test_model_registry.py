"""`ModelRegistry`: models found by file, registered from outside, and turned into a `ModelConfig`."""

import importlib.metadata
from typing import Any

import pytest

from quire.cache_spec import PagedKV
from quire.errors import ConfigError, ModelFileError, UnsupportedModelError
from quire.models import registry, smollm3
from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ModelRegistry
from tests.models.oracle import make_oracle, num_language_parameters
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, full_config


class Outside(LlamaForCausalLM):
    """A model of another package."""


@pytest.fixture(autouse=True)
def forget_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})


@pytest.mark.parametrize(
    "hf_config",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "of its own"},
        {"architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama"},
        {"architectures": None, "model_type": "llama"},
        {"architectures": ["SomethingElse", "LlamaForCausalLM"]},
    ],
)
def test_architecture_or_model_type_finds_the_class(hf_config: dict[str, Any]) -> None:
    assert ModelRegistry.resolve(hf_config) is LlamaForCausalLM


def test_unknown_architecture_lists_what_there_is_and_the_nearest() -> None:
    with pytest.raises(UnsupportedModelError, match=r"did you mean 'LlamaForCausalLM'.*OPTForCausalLM"):
        ModelRegistry.resolve({"architectures": ["LamaForCausalLM"]})


@pytest.mark.parametrize(
    "hf_config",
    [{}, {"architectures": []}, {"architectures": "LlamaForCausalLM"}, {"model_type": "registry"},
     {"model_type": "../llama"}, {"architectures": [3]}, {"architectures": {"a": 1}}],
)  # fmt: skip
def test_no_architecture_is_an_error(hf_config: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="names no architecture"):
        ModelRegistry.resolve(hf_config)


def test_file_without_the_table_says_how_it_must_end(monkeypatch: pytest.MonkeyPatch) -> None:
    registry._architectures_in.cache_clear()
    monkeypatch.delattr(smollm3, "ARCHITECTURES")
    message = r"smollm3.py has no ARCHITECTURES: end it with ARCHITECTURES = \{'<architecture>': TheClass\}"
    with pytest.raises(UnsupportedModelError, match=message):
        ModelRegistry.resolve({"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]})


def test_registered_class_wins_over_the_built_in_one() -> None:
    ModelRegistry.register_model("LlamaForCausalLM", Outside)
    assert ModelRegistry.resolve({"architectures": ["LlamaForCausalLM"]}) is Outside


def test_class_can_be_registered_by_name() -> None:
    ModelRegistry.register_model("OutsideForCausalLM", f"{__name__}:Outside")
    assert ModelRegistry.resolve({"architectures": ["OutsideForCausalLM"]}).__name__ == "Outside"
    assert "OutsideForCausalLM" in ModelRegistry.supported()


@pytest.mark.parametrize("target", ["no_such_module:Class", "quire.models.llama:NoSuchClass"])
def test_registered_name_that_cannot_be_imported_is_an_error(target: str) -> None:
    ModelRegistry.register_model("Broken", target)
    with pytest.raises(UnsupportedModelError, match=f"Broken is registered as {target}"):
        ModelRegistry.resolve({"architectures": ["Broken"]})


@pytest.mark.parametrize("target", ["no colon", "too:many:colons", int, LlamaForCausalLM.__init__])
def test_registering_other_objects_than_model_classes_fails(target: Any) -> None:
    with pytest.raises(ConfigError):
        ModelRegistry.register_model("Bad", target)


def test_model_class_that_takes_no_group_is_refused_by_name() -> None:
    class Groupless(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)

    with pytest.raises(ConfigError, match=r"Groupless.* must take \(config, group\)"):
        ModelRegistry.register_model("Groupless", Groupless)


def test_installed_packages_bring_models(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("PluginForCausalLM", f"{__name__}:Outside", "quire.models")
    points = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr("importlib.metadata.entry_points", points.select)
    assert ModelRegistry.resolve({"architectures": ["PluginForCausalLM"]}).__name__ == "Outside"
    assert "PluginForCausalLM" in ModelRegistry.supported()


@pytest.mark.parametrize("model_type", sorted(TINY_CONFIGS))
def test_parameters_are_counted_as_transformers_counts_them(model_type: str) -> None:
    for fields in TINY_CONFIGS[model_type].values():
        oracle = make_oracle(model_type, fields)
        config = ModelRegistry.make_model_config(full_config(model_type, fields))
        assert config.num_parameters == num_language_parameters(oracle)


def test_model_config_of_a_model() -> None:
    hf_config = full_config("llama", {**LLAMA, "bos_token_id": 1, "eos_token_id": 2})
    generation_config = {
        "eos_token_id": [7, 8], "temperature": 0.6, "top_k": None, "max_new_tokens": 40, "do_sample": True,
    }  # fmt: skip
    config = ModelRegistry.make_model_config(hf_config, generation_config)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (53, 48, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (4, 2, 12)
    assert config.context_len == 128
    assert config.cache_specs == (PagedKV(2, 12, 1),) * 2
    assert (config.bos_token_id, config.eos_token_ids) == (1, (7, 8))
    assert config.generation_defaults == {"temperature": 0.6, "max_tokens": 40}


@pytest.mark.parametrize(
    ("recommended", "message"),
    [
        ({"temperature": "hot"}, r"has temperature='hot', which is not a number in \[0, 2\]; correct it there"),
        ({"top_k": -5}, "has top_k=-5, which is not an integer of at least -1"),
        ({"max_new_tokens": 0}, "has max_new_tokens=0, which is not an integer of at least 1"),
    ],
)
def test_bad_generation_config_is_a_model_file_error(recommended: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=f"generation_config.json {message}"):
        ModelRegistry.make_model_config(full_config("llama", LLAMA), recommended)


def test_layers_have_the_windows_of_their_types() -> None:
    config = ModelRegistry.make_model_config(full_config("qwen2", TINY_CONFIGS["qwen2"]["layer types"]))
    assert config.cache_specs == (PagedKV(2, 12, 1, 3), PagedKV(2, 12, 1), PagedKV(2, 12, 1, 3))


def test_overrides_replace_fields() -> None:
    hf_config = full_config("llama", {**LLAMA, "strange_field": 3})
    overrides = {"strange_field": None, "max_position_embeddings": 64}
    config = ModelRegistry.make_model_config(hf_config, {}, overrides)
    assert config.context_len == 64
    assert config.hf_config["strange_field"] is None
    assert hf_config["strange_field"] == 3


@pytest.mark.parametrize(
    "field",
    [
        {"classifier_from_token": 1}, {"classifier_from_token": [1]}, {"num_labels": 10**9}, {"num_labels": "two"},
        {"num_labels": -1}, {"id2label": {"x": "yes"}}, {"id2label": {"-1": "yes"}}, {"id2label": {"\u00b2": "yes"}},
        {"id2label": {"9" * 5000: "yes"}},
    ],
)  # fmt: skip
def test_bad_labels_are_named(field: dict[str, Any]) -> None:
    fields = {**full_config("qwen3", LLAMA), "architectures": ["Qwen3ForSequenceClassification"], **field}
    with pytest.raises(ModelFileError, match=rf"the model's config has {next(iter(field))}="):
        ModelRegistry.make_model_config(fields)


def test_names_in_errors_are_short_and_printable() -> None:
    with pytest.raises(UnsupportedModelError, match=r"architecture \\x1b\\nx+… is not supported") as caught:
        ModelRegistry.make_model_config({"architectures": ["\x1b\n" + "x" * 100_000]}, model_impl="quire")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("value", [-1, "two", [1, "x"], True, 2.5])
def test_bad_token_ids_are_named(value: Any) -> None:
    with pytest.raises(ModelFileError, match="eos_token_id"):
        ModelRegistry.make_model_config(full_config("llama", {**LLAMA, "eos_token_id": value}))
