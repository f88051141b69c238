"""GGUF files of tiny models, written with the gguf package's names and keys: configs and logits as of safetensors.

Transformations are those of llama.cpp's converter: pairs of rotated rows side by side, 1 added to Gemma's norms.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, RopeScalingType

from quire.models.registry import ModelRegistry
from quire.weights.checkpoint import joined_latents, open_checkpoint
from quire.weights.gguf_architectures import ARCHITECTURES
from quire.weights.sources import ModelFiles
from tests.models.harness import random_tokens, stored
from tests.models.oracle import STORED_BUFFERS, Pair
from tests.models.test_conformance import assert_close
from tests.models.tiny_configs import (
    DEEPSEEK,
    GEMMA,
    GEMMA4,
    LFM2,
    LLAMA,
    LONGROPE,
    MINISTRAL_ROPE,
    MULTIPLES,
    TINY_CONFIGS,
    YARN,
)
from tests.runtime.plan.harness import PlanRunner, make_config

Write = Callable[[gguf.GGUFWriter], Any]
PHI = {
    **LLAMA, "pad_token_id": None, "partial_rotary_factor": 8 / 12, "sliding_window": 7,
    "original_max_position_embeddings": 1,
    "rope_scaling": {
        "type": "longrope", "original_max_position_embeddings": 1, "attention_factor": 1.25, **LONGROPE,
    },
}  # fmt: skip
GEMMA = {**GEMMA, "query_pre_attn_scalar": GEMMA["head_dim"], "num_hidden_layers": 3}
DEEPSEEK_SCALING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
MINISTRAL = {**LLAMA, "head_dim": 12, "pad_token_id": None, "rope_parameters": MINISTRAL_ROPE}


def _yarn(writer: gguf.GGUFWriter, **parameters: float) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(int(parameters["original"]))


def _phi3(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(7)
    writer.add_rope_dimension_count(8)
    writer.add_rope_scaling_orig_ctx_len(1)
    writer.add_rope_scaling_attn_factors(1.25)
    for name, factors in (("long", LONGROPE["long_factor"]), ("short", LONGROPE["short_factor"])):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))


def _olmo3(writer: gguf.GGUFWriter) -> None:
    _yarn(writer, factor=4.0, original=32)
    writer.add_rope_scaling_attn_factors(1.2)
    writer.add_sliding_window(6)
    writer.add_sliding_window_pattern([True, True, True, False])


def _granite(writer: gguf.GGUFWriter) -> None:
    writer.add_embedding_scale(MULTIPLES["embedding_multiplier"])
    writer.add_attention_scale(MULTIPLES["attention_multiplier"])
    writer.add_residual_scale(MULTIPLES["residual_multiplier"])
    writer.add_logit_scale(MULTIPLES["logits_scaling"])


def _gemma2(writer: gguf.GGUFWriter) -> None:
    writer.add_attn_logit_softcapping(40.0)
    writer.add_final_logit_softcapping(20.0)
    writer.add_sliding_window(5)


def _gemma3(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(5)
    writer.add_sliding_window_pattern(3)
    writer.add_rope_freq_base_swa(300.0)
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def _gemma4(writer: gguf.GGUFWriter) -> None:
    _gemma4_keys_alone(writer, [True, True, False, True, False])
    writer.add_shared_kv_layers(2)
    writer.add_embedding_length_per_layer_input(8)
    writer.add_final_logit_softcapping(3.0)


def _gemma4_keys_alone(writer: gguf.GGUFWriter, pattern: Sequence[bool] = (True, False, True, False)) -> None:
    writer.add_key_length_swa(12)
    writer.add_sliding_window(5)
    writer.add_sliding_window_pattern(list(pattern))
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 2 + [1e30] * 6, np.float32))


def _ministral3(writer: gguf.GGUFWriter) -> None:
    _yarn(writer, factor=8.0, original=16)
    writer.add_rope_scaling_yarn_beta_fast(32.0)
    writer.add_rope_scaling_yarn_beta_slow(1.0)
    writer.add_rope_scaling_yarn_log_mul(1.0)
    writer.add_attn_temperature_scale(0.1)


def _gpt_oss(writer: gguf.GGUFWriter) -> None:
    _yarn(writer, factor=4.0, original=32)
    writer.add_sliding_window(6)
    writer.add_expert_feed_forward_length(40)


def _deepseek(writer: gguf.GGUFWriter) -> None:
    _yarn(writer, factor=4.0, original=32)
    writer.add_rope_scaling_yarn_log_mul(0.1)
    writer.add_rope_dimension_count(8)
    writer.add_key_length(20)
    writer.add_value_length(10)
    writer.add_kv_lora_rank(24)
    writer.add_expert_feed_forward_length(20)
    writer.add_leading_dense_block_count(1)


def _deepseek2(writer: gguf.GGUFWriter) -> None:
    _deepseek(writer)
    writer.add_expert_shared_count(2)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def _deepseek3(writer: gguf.GGUFWriter) -> None:
    _deepseek(writer)
    writer.add_q_lora_rank(20)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(4)
    writer.add_expert_group_used_count(2)


def _apart(writer: gguf.GGUFWriter) -> None:
    """As llama.cpp writes it now: keys and values projected apart, and sizes of the cache beside those of heads."""
    _deepseek2(writer)
    writer.add_head_count_kv(1)
    writer.add_key_length(24 + 8)
    writer.add_value_length(24)
    writer.add_key_length_mla(20)
    writer.add_value_length_mla(10)


def _lfm2(writer: gguf.GGUFWriter) -> None:
    writer.add_head_count_kv([0, 2, 0])
    writer.add_shortconv_l_cache(3)


def nothing(writer: gguf.GGUFWriter) -> None:
    """The common keys say it all."""


CASES: dict[str, tuple[str, dict[str, Any], MODEL_ARCH, Write]] = {
    "llama": ("llama", TINY_CONFIGS["llama"]["all biases"], MODEL_ARCH.LLAMA, nothing),
    "llama, yarn": ("llama", {**LLAMA, "rope_scaling": YARN}, MODEL_ARCH.LLAMA,
                    lambda writer: _yarn(writer, factor=4.0, original=32)),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 5}, MODEL_ARCH.LLAMA,
                lambda writer: writer.add_sliding_window(5)),
    "qwen2": ("qwen2", TINY_CONFIGS["qwen2"]["plain"], MODEL_ARCH.QWEN2, nothing),
    "qwen3": ("qwen3", TINY_CONFIGS["qwen3"]["head size of its own"], MODEL_ARCH.QWEN3, nothing),
    "qwen3moe": ("qwen3_moe", TINY_CONFIGS["qwen3_moe"]["two of eight, head size of its own"], MODEL_ARCH.QWEN3MOE,
                 lambda writer: writer.add_expert_feed_forward_length(24)),
    "olmoe": ("olmoe", TINY_CONFIGS["olmoe"]["two of eight"], MODEL_ARCH.OLMOE, nothing),
    "gpt-oss": ("gpt_oss", TINY_CONFIGS["gpt_oss"]["two of four, yarn"], MODEL_ARCH.GPT_OSS, _gpt_oss),
    "mixtral": ("mixtral", TINY_CONFIGS["mixtral"]["two of four"], MODEL_ARCH.LLAMA, nothing),
    "phi3": ("phi3", PHI, MODEL_ARCH.PHI3, _phi3),
    "phi3, whole heads": ("phi3", {**LLAMA, "pad_token_id": None}, MODEL_ARCH.PHI3,
                          lambda writer: writer.add_sliding_window(0)),
    "smollm3": ("smollm3", {**LLAMA, "num_hidden_layers": 4, "pad_token_id": None}, MODEL_ARCH.SMOLLM3, nothing),
    "olmo2": ("olmo2", TINY_CONFIGS["olmo2"]["three heads, odd sizes"], MODEL_ARCH.OLMO2, nothing),
    "olmo3": ("olmo3", TINY_CONFIGS["olmo3"]["scaled where there is no window"], MODEL_ARCH.OLMO2, _olmo3),
    "granite": ("granite", TINY_CONFIGS["granite"]["multiples"], MODEL_ARCH.GRANITE, _granite),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0},
               MODEL_ARCH.GEMMA2, _gemma2),
    "gemma3": ("gemma3_text", {
        **GEMMA, "sliding_window_pattern": 3, "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }, MODEL_ARCH.GEMMA3, _gemma3),
    "gemma4": ("gemma4_text", {**next(iter(TINY_CONFIGS["gemma4_text"].values())), "global_head_dim": 16},
               MODEL_ARCH.GEMMA4, _gemma4),
    "gemma4, values that are keys": ("gemma4_text", {
        **GEMMA4, "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    }, MODEL_ARCH.GEMMA4, _gemma4_keys_alone),
    "glm4": ("glm4", TINY_CONFIGS["glm4"]["neighbouring pairs"], MODEL_ARCH.GLM4,
             lambda writer: writer.add_rope_dimension_count(8)),
    "starcoder2": ("starcoder2", TINY_CONFIGS["starcoder2"]["biases, window"], MODEL_ARCH.STARCODER2,
                   lambda writer: writer.add_sliding_window(6)),
    "deepseek2": ("deepseek_v2", {**DEEPSEEK, "rope_scaling": DEEPSEEK_SCALING}, MODEL_ARCH.DEEPSEEK2, _deepseek2),
    "deepseek2, apart": ("deepseek_v2", {**DEEPSEEK, "rope_scaling": DEEPSEEK_SCALING}, MODEL_ARCH.DEEPSEEK2, _apart),
    "deepseek2, sigmoid": ("deepseek_v3", {
        **TINY_CONFIGS["deepseek_v3"]["sigmoid, two of four groups, yarn"], "rope_scaling": DEEPSEEK_SCALING,
    }, MODEL_ARCH.DEEPSEEK2, _deepseek3),
    "lfm2": ("lfm2", {
        **LFM2, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
        "block_auto_adjust_ff_dim": False,
    }, MODEL_ARCH.LFM2, _lfm2),
    "ministral3": ("ministral3", MINISTRAL, MODEL_ARCH.MISTRAL3, _ministral3),
}  # fmt: skip
SIDE_BY_SIDE = (MODEL_ARCH.LLAMA, MODEL_ARCH.SMOLLM3, MODEL_ARCH.GRANITE, MODEL_ARCH.MISTRAL3)
"""llama.cpp rotates neighbouring pairs of these, which Transformers does not."""


def write_gguf(path: Path, pair: Pair, arch: MODEL_ARCH, write: Write) -> None:
    """Write the pair's weights under the names of llama.cpp."""
    config = pair.oracle.config
    # Per layer its MLP columns and config, where they differ; the last has no window.
    layers = [(pair.oracle.model.layers[index].mlp.intermediate_size, config.per_layer_config[index])
              for index in range(config.num_hidden_layers) if arch == MODEL_ARCH.GEMMA4]  # fmt: skip
    of_heads = layers[-1][1] if layers else config
    head_size = getattr(of_heads, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length([width for width, _ in layers] or config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([layer.num_key_value_heads for _, layer in layers] or config.num_key_value_heads)
    if arch != MODEL_ARCH.DEEPSEEK2:
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    if arch == MODEL_ARCH.STARCODER2:
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps if arch == MODEL_ARCH.LFM2 else config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if num_experts := getattr(config, "n_routed_experts", getattr(config, "num_experts", None)):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    write(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in pair.oracle.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = f"{name}.weight" if name.endswith("sinks") else name
        if name.endswith("layer_scalar"):
            name = f"{name}.weight"
        elif name.endswith(STORED_BUFFERS):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", tensor.numpy())
            continue
        if ".experts." in name:
            write_experts(writer, arch, name, tensor)
            continue
        values = tensor.squeeze(1).numpy() if name.endswith("conv.conv.weight") else tensor.numpy()
        if write is _apart and "kv_b_proj" in name:
            heads = tensor.view(config.num_attention_heads, -1, tensor.shape[-1]).split((20 - 8, 10), dim=1)
            for part, head in (("k_b", heads[0].mT), ("v_b", heads[1])):
                writer.add_tensor(f"blk.{name.split('.')[2]}.attn_{part}.weight", head.contiguous().numpy())
            continue
        if arch in SIDE_BY_SIDE and ("q_proj" in name or "k_proj" in name):
            halves = values.reshape(len(values) // head_size, 2, head_size // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if arch in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
            values = values + np.float32(1)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_experts(writer: gguf.GGUFWriter, arch: MODEL_ARCH, name: str, stack: torch.Tensor) -> None:
    """Write all gates, ups or downs of a layer; gpt-oss has inputs as rows, and gates and ups in turns."""
    if arch == MODEL_ARCH.GPT_OSS:
        stack = stack.mT if stack.ndim == 3 else stack
        if "gate_up" in name:
            stack = torch.cat([stack[:, 0::2], stack[:, 1::2]], 1)
    parts = {"ffn_down_exps": stack}
    if "gate_up" in name:
        parts = dict(zip(("ffn_gate_exps", "ffn_up_exps"), stack.chunk(2, 1), strict=True))
    for part, values in parts.items():
        kind = "bias" if name.endswith("bias") else "weight"
        writer.add_tensor(f"blk.{name.split('.')[2]}.{part}.{kind}", np.ascontiguousarray(values.numpy()))


@pytest.mark.parametrize("name", CASES)
def test_gguf_gives_the_config_and_logits_of_safetensors(tmp_path: Path, name: str) -> None:
    model_type, fields, arch, write = CASES[name]
    pair = Pair(model_type, fields)
    path = tmp_path / "model.gguf"
    write_gguf(path, pair, arch, write)
    checkpoint = open_checkpoint(ModelFiles(name="tiny", path=path, kind="gguf", origin="test"))
    config_class = ModelRegistry.resolve(checkpoint.hf_config).Config
    assert config_class is ModelRegistry.resolve(pair.hf_config).Config
    assert config_class.from_hf(checkpoint.hf_config) == config_class.from_hf(pair.hf_config)
    token_ids = random_tokens(33, 53)
    runner, other = PlanRunner(make_config(checkpoint.hf_config), checkpoint), pair.runner()
    found, expected = (each.run(each.add(token_ids)) for each in (runner, other))
    assert torch.equal(found, expected)
    assert_close(found, pair.expected(token_ids))


@pytest.mark.parametrize(
    ("formats", "joined"), [(("F32", "F32"), "F32"), (("BF16", "BF16"), "BF16"), (("F16", "Q8_0"), "F16")]
)
def test_latents_stored_apart_become_one_projection(formats: tuple[str, str], joined: str) -> None:
    keys, values = torch.randn(3, 32, 5), torch.randn(3, 7, 32)
    tensors = (stored(f"{name}_b_proj.weight", part, kind)
               for name, part, kind in zip("kv", (keys, values), formats, strict=True))  # fmt: skip
    found = joined_latents(*tensors)
    expected = torch.cat([keys.mT, values], dim=1).reshape(-1, 32)
    assert (found.name, found.format, found.shape) == ("kv_b_proj.weight", joined, (36, 32))
    assert torch.allclose(found.to_torch(torch.float32), expected, rtol=0.02, atol=0.02)


def test_every_gguf_architecture_is_written_here() -> None:
    assert {gguf.MODEL_ARCH_NAMES[arch] for _, _, arch, _ in CASES.values()} == set(ARCHITECTURES)
