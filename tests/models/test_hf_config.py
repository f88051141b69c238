"""Every field of a config is honoured, refused, or known to be harmless."""

import math
from typing import Any

import pytest
import transformers

from quire.errors import ModelError, ModelFileError, UnsupportedModelError
from quire.layers.rotary import RopeConfig
from quire.models.hf_rope import ORIGINAL
from quire.models.registry import ModelRegistry
from tests.models.tiny_configs import LLAMA, LLAMA3_ROPE, MINISTRAL_ROPE, TINY_CONFIGS, YARN, full_config

CASES = [(model_type, name) for model_type, configs in TINY_CONFIGS.items() for name in configs]


def read(model_type: str, fields: dict[str, Any]) -> Any:
    hf_config = full_config(model_type, fields)
    return ModelRegistry.resolve(hf_config).Config.from_hf(hf_config)


def llama(**changes: Any) -> Any:
    return read("llama", {**LLAMA, **changes})


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_config_written_by_transformers_reads_the_same(model_type: str, name: str) -> None:
    """transformers 5 fills in all its fields and renames some."""
    fields = TINY_CONFIGS[model_type][name]
    written = transformers.CONFIG_MAPPING[model_type](**fields).to_dict()
    assert read(model_type, written) == read(model_type, fields)


@pytest.mark.parametrize(
    "field", ["query_pre_attn_scalar", "attn_logit_softcapping", "quantization_config", "num_experts"]
)
def test_unknown_fields_are_refused_by_name(field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{field}=7.*hf_overrides=\{{'{field}': None\}}"):
        llama(**{field: 7})


@pytest.mark.parametrize("model_type", TINY_CONFIGS)
def test_every_family_refuses_a_field_that_it_does_not_know(model_type: str) -> None:
    fields = next(iter(TINY_CONFIGS[model_type].values()))
    read(model_type, fields)
    for changed in [{**fields, "attention_curvature": 7}] + (
        [{**fields, "text_config": {**fields["text_config"], "attention_curvature": 7}}]
        if "text_config" in fields
        else []
    ):
        with pytest.raises(UnsupportedModelError, match="attention_curvature=7"):
            read(model_type, changed)


def test_unknown_fields_that_are_null_are_harmless() -> None:
    assert llama(attn_logit_softcapping=None) == llama()


def test_misspelt_field_names_the_nearest() -> None:
    with pytest.raises(UnsupportedModelError, match="did you mean 'rms_norm_eps'"):
        llama(rms_norm_epss=1e-5)


def test_harmless_fields_are_ignored() -> None:
    changes = {
        "pretraining_tp": 4, "torch_dtype": "bfloat16", "attention_dropout": 0.1, "use_cache": True,
        "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"},
        "_name_or_path": "a/b", "_model_name_or_path": "a/b", "model_name_or_path": "a/b", "_auto_class": "AutoModel",
        "_attn_implementation_autoset": True, "_experts_implementation": "eager", "_output_attentions": False,
        "_pre_quantization_dtype": "bfloat16", "pruned_heads": {},
    }  # fmt: skip
    assert llama(**changes) == llama()


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ("llama", {"pruned_heads": {"0": [1]}}, "pruned_heads="),
        ("llama", {"_curvature": 7}, "_curvature=7"),
        ("llama", {"sliding_window": 5}, "sliding_window=5"),
        ("llama", {"rope_scaling": {"rope_type": "yarm", "factor": 4.0}}, "rope_type 'yarm'.*'yarn'.*default, linear"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope_type 'ntk'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0, "beta_fast": 3}}, "beta_fast=3 .*'linear'"),
        ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ("qwen2", {"attention_bias": False}, "attention_bias=False"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("opt", {"activation_function": "silu"}, "activation_function='silu'.*'relu', 'gelu'"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=True"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2"),
        ("phi3", {"rope_scaling": {"type": "mrope"}}, "rope_type 'mrope'"),
        ("smollm3", {"layer_types": ["full_attention", "chunked"] * 2}, "chunked"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters.rope_type"),
        ("granite", {"position_embedding_type": "nope"}, "position_embedding_type=nope"),
        ("granitemoehybrid", {"time_step_limit": [0.0, 1.0]}, "time_step_limit=.0.0, 1.0"),
        ("granitemoehybrid", {"layer_types": ["mamba", "chunked"]}, "'chunked'"),
        ("mamba2", {"rms_norm": False}, "rms_norm=False"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "mlp"]}, "'mlp'"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers=.1"),
        ("qwen3_5", {"text_config": {"model_type": "qwen3_next"}}, "text_config.model_type='qwen3_next'.*qwen3_5_text"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation='silu'.*'gelu_pytorch_tanh'"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"vision_tower_dim": 3}, "vision_tower_dim=3"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config="),
        ("gemma4_text", {"vocab_size_per_layer_input": 50}, "vocab_size_per_layer_input=50, less than vocab_size=53"),
        ("gemma3", {"text_config": {"model_type": "llama"}}, "text_config.model_type='llama'.*gemma3_text"),
        ("mistral3", {"text_config": {"model_type": "mistral"}}, "text_config.model_type='mistral'.*ministral3"),
        ("glm4", {"rope_interleaved": True}, "rope_interleaved=True"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type='rms_norm'.*'layer_norm'"),
        ("ministral3", {"attention_bias": True}, "attention_bias=True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'.*'greedy', 'group_limited_greedy'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'.*'softmax'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads=2.*4"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'.*'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'.*'sigmoid'"),
    ],
)
def test_fields_that_would_change_the_mathematics_are_refused(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    fields = next(iter(TINY_CONFIGS[model_type].values()))
    with pytest.raises(UnsupportedModelError, match=message):
        read(model_type, {**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"num_hidden_layers": 1001}, "num_hidden_layers=1001, which is not an integer from 1 to 1000"),
        ({"hidden_size": 2**28}, "hidden_size=268435456, which is not an integer from 1 to 1048576"),
        ({"head_dim": 2**28}, "head_dim=268435456, which is not an integer from 1 to 1048576"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_attention_heads": 5}, "hidden_size=48, which is not a multiple of num_attention_heads=5"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4, which is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.*is not a number above 0, from 1e-18 to 1e\\+18"),
        ({"rms_norm_eps": 1e-320}, "rms_norm_eps=1e-320"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, r"factor=1e\+308"),
        ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor=1.0.*above low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, "factor='two'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 3}}, "truncate=3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, "rope_theta=1.0.*above 1"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "lacks long_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": 3}}, "long_factor=3"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "1 numbers in short_factor, but 6",
        ),
    ],
)
def test_bad_value_names_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        llama(**changes)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers=.*4 numbers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=.*4 numbers"),
        ("mixtral", {"num_hidden_layers": 500, "num_local_experts": 132}, "num_local_experts=132.* from 1 to 131"),
        (
            "granitemoehybrid",
            {"num_hidden_layers": 500, "layer_types": None, "num_local_experts": 132},
            "num_local_experts=132.* from 0 to 131",
        ),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier=0"),
        ("granite", {"residual_multiplier": 1e308}, "residual_multiplier=1e"),
        ("granite", {"residual_multiplier": 1e-320}, "residual_multiplier=1e-320"),
        (
            "ministral3",
            {"max_position_embeddings": 2**31 - 1, "rope_parameters": {**MINISTRAL_ROPE, ORIGINAL: 1}},
            f"{ORIGINAL}=1, which is not at least max_position_embeddings / 65536",
        ),
        ("ministral3", {"rope_parameters": {**MINISTRAL_ROPE, ORIGINAL: 0.5}}, f"{ORIGINAL}=0, which is not at least"),
        ("deepseek_v2", {"rope_scaling": {**YARN, "beta_fast": 1e308}}, "beta_fast=1e"),
        ("deepseek_v2", {"rope_scaling": {**YARN, "beta_slow": 1e-320}}, "beta_slow=1e-320"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0"),
        ("glm4", {"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2.*pairs"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "lacks llama_4_scaling_beta"),
        ("deepseek_v3", {"n_group": 3}, "n_routed_experts=8, which is not a multiple of n_group=3"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group=5 of n_group=4 groups of 2 experts: set topk_group to 2 … 4"),
        ("deepseek_v3", {"topk_group": 1}, "set topk_group to 2 … 4, which leaves num_experts_per_tok=3"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7, which is not a multiple of 2"),
        ("deepseek_v2", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ("deepseek_v2", {"rope_scaling": {**YARN, "mscale_all_dim": "x"}}, "mscale_all_dim='x'"),
    ],
)
def test_bad_value_of_a_family_names_field_and_value(model_type: str, changes: dict[str, Any], message: str) -> None:
    fields = next(iter(TINY_CONFIGS[model_type].values()))
    with pytest.raises(ModelFileError, match=message):
        read(model_type, {**fields, **changes})


VALUES = (
    None, [], {}, "", -1, 0, 1.5, "x", True, [1], {"a": 1}, 1, 10**400, 1e308, 1e-320, math.nan, math.inf, "\x1b[2J",
    "\ud800", [None, []], {"rope_type": []}, {"rope_type": "yarn", "factor": 1e308},
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("model_type", sorted(TINY_CONFIGS))
def test_no_value_of_any_field_raises_anything_but_a_model_error(model_type: str, value: Any) -> None:
    fields = transformers.CONFIG_MAPPING[model_type](**next(iter(TINY_CONFIGS[model_type].values()))).to_dict()
    messages = []
    for name in fields:
        hf_config = {**fields, "architectures": full_config(model_type, {})["architectures"], name: value}
        try:
            config = ModelRegistry.resolve(hf_config).Config.from_hf(hf_config)
        except ModelError as error:
            messages.append(str(error))
            continue
        assert min(config.vocab_size, config.hidden_size, config.num_layers) > 0
    assert [text for text in messages if not text.isprintable()] == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5.0}, RopeConfig(5.0)),
        ({"rope_parameters": {"rope_theta": 6.0, "rope_type": "default"}}, RopeConfig(6.0)),
        ({"rope_scaling": None, "rope_theta": 7.0}, RopeConfig(7.0)),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
            RopeConfig(kind="linear", factor=2.0),
        ),
        ({"rope_scaling": {**LLAMA3_ROPE}}, RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 32.0)),
        ({"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 9.0}}, RopeConfig(9.0, "llama3", 8.0, 1.0, 4.0, 32.0)),
    ],
)
def test_rope_in_both_spellings(changes: dict[str, Any], expected: RopeConfig) -> None:
    assert llama(**changes).rope == expected


def test_windows_follow_the_config() -> None:
    mistral, qwen = TINY_CONFIGS["mistral"]["no window"], TINY_CONFIGS["qwen2"]["plain"]
    sliding = {"use_sliding_window": True, "sliding_window": 6}
    assert read("mistral", mistral).windows == (None, None)
    assert read("mistral", {**mistral, "sliding_window": 9}).windows == (9, 9)
    assert read("mistral", LLAMA).windows == (4096, 4096)
    assert read("qwen2", {**qwen, **sliding, "max_window_layers": 1}).windows == (None, 6)
    assert read("qwen2", {**qwen, **sliding, "max_window_layers": 0}).windows == (6, 6)
    assert read("qwen2", {**qwen, "sliding_window": 6, "max_window_layers": 0}).windows == (None, None)
