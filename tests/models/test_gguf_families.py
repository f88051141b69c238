"""GGUF files of tiny models, written with the gguf package's names and keys: configs and logits as of safetensors.

Transformations are those of llama.cpp's converter: pairs of rotated rows side by side, 1 added to Gemma's norms, and
those of layers with state in `with_state`.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, RopeScalingType

from quire.errors import ModelFileError
from quire.models.registry import ModelRegistry
from quire.runtime.loader import make_stored
from quire.weights.checkpoint import joined_latents, open_checkpoint
from quire.weights.gguf_architectures import ARCHITECTURES
from quire.weights.gguf_recurrent import StateSizes, as_huggingface
from quire.weights.sources import ModelFiles
from quire.weights.weight_tensor import WeightTensor, quantize
from tests.models.harness import random_tokens, stored
from tests.models.oracle import STORED_BUFFERS, Pair
from tests.models.test_conformance import assert_close
from tests.models.tiny_configs import (
    DEEPSEEK,
    DELTA_NET,
    GEMMA,
    GEMMA4,
    GEMMA4_EXPERTS,
    LFM2,
    LLAMA,
    LONGROPE,
    MAMBA2,
    MINISTRAL_ROPE,
    MULTIPLES,
    QWEN2_MOE,
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
GRANITE4_STATES = {
    **TINY_CONFIGS["granitemoehybrid"]["state spaces with one wide head and experts beside attention"],
    "mamba_n_heads": 4,
}
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
    writer.add_value_length_swa(12)
    writer.add_rope_dimension_count(16)
    writer.add_rope_dimension_count_swa(12)
    writer.add_sliding_window(5)
    writer.add_sliding_window_pattern(list(pattern))
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * 2 + [1e30] * 6, np.float32))


def _gemma4_experts(writer: gguf.GGUFWriter) -> None:
    _gemma4_keys_alone(writer)
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_expert_count(6)
    writer.add_expert_used_count(3)
    writer.add_expert_feed_forward_length(20)


def _gpt_neox(writer: gguf.GGUFWriter, *, is_parallel: bool = True) -> None:
    writer.add_rope_dimension_count(6 if is_parallel else 4)
    writer.add_parallel_residual(is_parallel)


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
    """Write keys and values projected apart, and sizes of the cache beside those of heads, as llama.cpp does now."""
    _deepseek2(writer)
    writer.add_head_count_kv(1)
    writer.add_key_length(24 + 8)
    writer.add_value_length(24)
    writer.add_key_length_mla(20)
    writer.add_value_length_mla(10)


def _glm4moe(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_dimension_count(8)
    writer.add_expert_feed_forward_length(20)
    writer.add_expert_shared_count(1)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)


def _lfm2(writer: gguf.GGUFWriter) -> None:
    writer.add_head_count_kv([0, 2, 0])
    writer.add_shortconv_l_cache(3)


def _ssm(writer: gguf.GGUFWriter, num_taps: int, inner: int, state: int, heads: int, groups: int) -> None:
    writer.add_ssm_conv_kernel(num_taps)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)


def _granite4(writer: gguf.GGUFWriter) -> None:
    _granite(writer)
    _ssm(writer, 4, 96, 16, 4, 1)
    writer.add_rope_scaling_finetuned(False)
    writer.add_head_count_kv([0, 2, 0])
    writer.add_expert_shared_feed_forward_length(40)


def _granite4_moe(writer: gguf.GGUFWriter) -> None:
    _granite4(writer)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)


def _shared_expert(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_feed_forward_length(24)
    writer.add_expert_shared_feed_forward_length(32)


def _qwen3next(writer: gguf.GGUFWriter) -> None:
    _ssm(writer, 4, 8 * 16, 12, 8, 4)
    writer.add_rope_dimension_count(4)
    writer.add_full_attention_interval(2)
    _shared_expert(writer)


def _qwen35(writer: gguf.GGUFWriter) -> None:
    """Add a layer that predicts further tokens, which is passed over."""
    _ssm(writer, 4, 8 * 16, 12, 8, 4)
    writer.add_rope_dimension_count(4)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_array("qwen35.attention.recurrent_layers", [False, True, False])
    writer.add_block_count(3)
    writer.add_nextn_predict_layers(1)
    writer.add_tensor("blk.2.attn_norm.weight", np.ones(64, np.float32))
    writer.add_tensor("blk.2.nextn.eh_proj.weight", np.ones((64, 128), np.float32))


def nothing(writer: gguf.GGUFWriter) -> None:
    """Add nothing: the common keys say it all."""


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
    "gemma4, experts": ("gemma4_text", {**GEMMA4_EXPERTS, "global_head_dim": 16}, MODEL_ARCH.GEMMA4, _gemma4_experts),
    "gpt2": ("gpt2", TINY_CONFIGS["gpt2"]["three heads"], MODEL_ARCH.GPT2,
             lambda writer: writer.add_feed_forward_length(4 * 48)),
    "gptneox": ("gpt_neox", TINY_CONFIGS["gpt_neox"]["side by side"], MODEL_ARCH.GPTNEOX, _gpt_neox),
    "gptneox, one after the other": ("gpt_neox", TINY_CONFIGS["gpt_neox"]["one after the other, three heads"],
                                     MODEL_ARCH.GPTNEOX, lambda writer: _gpt_neox(writer, is_parallel=False)),
    "glm4": ("glm4", TINY_CONFIGS["glm4"]["neighbouring pairs"], MODEL_ARCH.GLM4,
             lambda writer: writer.add_rope_dimension_count(8)),
    "glm4moe": ("glm4_moe", TINY_CONFIGS["glm4_moe"]["norms of heads, three of eight, a dense layer"],
                MODEL_ARCH.GLM4_MOE, _glm4moe),
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
    "qwen2moe": ("qwen2_moe", TINY_CONFIGS["qwen2_moe"]["shared expert"], MODEL_ARCH.QWEN2MOE, _shared_expert),
    "mamba2": ("mamba2", TINY_CONFIGS["mamba2"]["groups of 2"], MODEL_ARCH.MAMBA2,
               lambda writer: _ssm(writer, 4, 96, 16, 8, 4)),
    "mamba2, no bias": ("mamba2", {**MAMBA2, "use_conv_bias": False, "n_groups": 1, "tie_word_embeddings": True},
                        MODEL_ARCH.MAMBA2, lambda writer: _ssm(writer, 4, 96, 16, 8, 1)),
    "granitehybrid": ("granitemoehybrid", {
        **GRANITE4_STATES, "num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 40,
    }, MODEL_ARCH.GRANITE_HYBRID, _granite4),
    "granitehybrid, experts": ("granitemoehybrid", GRANITE4_STATES, MODEL_ARCH.GRANITE_HYBRID, _granite4_moe),
    "qwen3next": ("qwen3_next", {**DELTA_NET, **QWEN2_MOE, "full_attention_interval": 2}, MODEL_ARCH.QWEN3NEXT,
                  _qwen3next),
    "qwen35": ("qwen3_5_text", {
        **DELTA_NET, "hidden_size": 64, "layer_types": ["full_attention", "linear_attention"],
    }, MODEL_ARCH.QWEN35, _qwen35),
    "qwen35moe": ("qwen3_5_moe_text", TINY_CONFIGS["qwen3_5_moe_text"]["two of six, interval of 2"],
                  MODEL_ARCH.QWEN35MOE, _qwen3next),
    "ministral3": ("ministral3", MINISTRAL, MODEL_ARCH.MISTRAL3, _ministral3),
}  # fmt: skip
SIDE_BY_SIDE = (
    MODEL_ARCH.LLAMA,
    MODEL_ARCH.SMOLLM3,
    MODEL_ARCH.GRANITE,
    MODEL_ARCH.MISTRAL3,
    MODEL_ARCH.GRANITE_HYBRID,
)
"""llama.cpp rotates neighbouring pairs of these, which Transformers does not."""
GPTS = (MODEL_ARCH.GPT2, MODEL_ARCH.GPTNEOX)
"""Without keys of heads."""
LAYER_NORMS = {
    MODEL_ARCH.STARCODER2: "norm_epsilon",
    MODEL_ARCH.GPT2: "layer_norm_epsilon",
    MODEL_ARCH.GPTNEOX: "layer_norm_eps",
}
WITH_STATE = (
    MODEL_ARCH.MAMBA2, MODEL_ARCH.GRANITE_HYBRID, MODEL_ARCH.QWEN3NEXT, MODEL_ARCH.QWEN35, MODEL_ARCH.QWEN35MOE,
)  # fmt: skip
"""A_log is the logarithm of what they store, so that its last bits differ."""


def write_gguf(path: Path, pair: Pair, arch: MODEL_ARCH, write: Write) -> None:
    """Write the pair's weights under the names of llama.cpp."""
    config = pair.oracle.config
    num_heads = getattr(config, "num_attention_heads", 0)
    # Per layer its MLP columns and config, where they differ; the last has no window.
    layers = [(pair.oracle.model.layers[index].mlp.intermediate_size, config.per_layer_config[index])
              for index in range(config.num_hidden_layers) if arch == MODEL_ARCH.GEMMA4]  # fmt: skip
    of_heads = layers[-1][1] if layers else config
    head_size = getattr(of_heads, "head_dim", None) or config.hidden_size // num_heads
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(getattr(config, "max_position_embeddings", 2**20))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if arch != MODEL_ARCH.QWEN35MOE:
        writer.add_feed_forward_length([width for width, _ in layers] or getattr(config, "intermediate_size", 0))
    writer.add_head_count(num_heads)
    if arch not in (MODEL_ARCH.MAMBA2, *GPTS):
        writer.add_head_count_kv([layer.num_key_value_heads for _, layer in layers] or config.num_key_value_heads)
    if arch not in (MODEL_ARCH.DEEPSEEK2, MODEL_ARCH.MAMBA2, *GPTS):
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    if epsilon := LAYER_NORMS.get(arch):
        writer.add_layer_norm_eps(getattr(config, epsilon))
    else:
        epsilon = {MODEL_ARCH.LFM2: "norm_eps", MODEL_ARCH.MAMBA2: "layer_norm_epsilon"}.get(arch, "rms_norm_eps")
        writer.add_layer_norm_rms_eps(getattr(config, epsilon))
    if rope := getattr(config, "rope_parameters", None):
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    num_experts = getattr(config, "n_routed_experts", getattr(config, "num_experts", None))
    if num_experts and arch != MODEL_ARCH.GEMMA4:
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
        if arch in WITH_STATE:
            for part, values in with_state(config, name, tensor).items():
                add(writer, names, part, values)
            continue
        if ".router." in name and name.endswith("scale"):
            part = "ffn_down_exps" if "per_expert" in name else "ffn_gate_inp"
            writer.add_tensor(f"blk.{name.split('.')[2]}.{part}.scale", tensor.numpy())
            continue
        if ".experts." in name and arch == MODEL_ARCH.GEMMA4:
            add(writer, names, f"{name}.weight", tensor.numpy())
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
        if arch == MODEL_ARCH.GPT2 and values.ndim == 2 and ".h." in name:
            values = values.T
        if arch == MODEL_ARCH.QWEN2MOE and name.endswith("shared_expert_gate.weight"):
            values = values[0]  # as old converters wrote it
        if "query_key_value" in name:
            heads = values.reshape(num_heads, 3, -1, *values.shape[1:])
            values = heads.swapaxes(0, 1).reshape(values.shape)
        if arch in (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
            values = values + np.float32(1)
        add(writer, names, name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, names: gguf.TensorNameMap, name: str, values: Any) -> None:
    """Write a tensor by its Hugging Face name, or that of the file."""
    stored_name = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
    writer.add_tensor(stored_name, np.ascontiguousarray(values))


def with_state(config: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that llama.cpp's converter makes of Mamba 2, Granite 4, Qwen3-Next or Qwen3.5."""
    is_delta, is_qwen35 = "linear_key_head_dim" in dir(config), config.model_type.startswith("qwen3_5")
    name = name.replace("router.weight", "router.layer.weight")
    module, _, part = name.rpartition(".")
    if name.endswith("experts.down_proj"):
        return {f"blk.{name.split('.')[2]}.ffn_down_exps.weight": tensor}
    if name.endswith(("input_linear.weight", "gate_up_proj")):
        kind = "_exps" if tensor.ndim == 3 else "_shexp" if config.num_local_experts else ""
        stored = [f"blk.{name.split('.')[2]}.ffn_{each}{kind}.weight" for each in ("gate", "up")]
        return dict(zip(stored, tensor.chunk(2, -2), strict=True))
    if "shared_mlp.output_linear" in name and not config.num_local_experts:
        return {name.replace("shared_mlp.output_linear", "mlp.down_proj"): tensor}
    if name.endswith(("q_proj.weight", "k_proj.weight")) and not is_delta:
        halves = tensor.view(-1, 2, config.hidden_size // config.num_attention_heads // 2, tensor.shape[-1])
        return {name: halves.transpose(1, 2).reshape(tensor.shape)}
    if is_delta and name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: tensor + 1}
    if part == "dt_bias":
        name = f"{module}.dt_proj.bias"
    tensor = (
        -tensor.exp() if part == "A_log" else tensor.squeeze(1) if tensor.ndim == 3 and "conv1d" in name else tensor
    )
    if not is_delta:
        if part in ("A_log", "D"):
            tensor = tensor[:, None]
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            tensor = tensor.view(getattr(config, "n_groups", getattr(config, "mamba_n_groups", 1)), -1)
        return {name: tensor}
    heads, size = config.linear_num_key_heads, config.linear_value_head_dim
    ratio, keys = config.linear_num_value_heads // heads, 2 * heads * config.linear_key_head_dim

    def in_turns(values: torch.Tensor, size: int) -> torch.Tensor:
        return values.view(heads, ratio, size, -1).transpose(0, 1).reshape(values.shape)

    if "in_proj_qkvz" in name:
        widths = (keys // 2 // heads,) * 2 + (ratio * size,) * 2
        q, k, v, z = (rows.flatten(0, 1) for rows in tensor.view(heads, -1, tensor.shape[-1]).split(widths, 1))
        return {name.replace("qkvz", "qkv"): torch.cat([q, k, v]), name.replace("qkvz", "z"): z}
    if not is_qwen35:
        return {name: tensor}
    if "in_proj_qkv" in name or "conv1d" in name:
        return {name: torch.cat([tensor[:keys], in_turns(tensor[keys:], size)])}
    if "out_proj" in name:
        return {name: in_turns(tensor.mT, size).mT}
    is_value = "in_proj_" in name or part in ("A_log", "dt_bias")
    return {name: in_turns(tensor, size if "in_proj_z" in name else 1) if is_value else tensor}


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
    stored = make_stored(pair.hf_config, checkpoint.tensors).config
    assert config_class.from_hf(checkpoint.hf_config) == stored
    token_ids = random_tokens(33, 53)
    runner, other = PlanRunner(make_config(checkpoint.hf_config), checkpoint), pair.runner()
    found, expected = (each.run(each.add(token_ids)) for each in (runner, other))
    if arch in WITH_STATE:
        assert_close(found, expected)
    else:
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


@pytest.mark.parametrize(("kind", "size", "encoded"), [("Q8_0", 32, "Q8_0"), ("Q4_K", 128, "Q8_0"), ("F32", 6, "F32")])
def test_columns_of_value_heads_stored_in_turns_are_put_in_order(kind: str, size: int, encoded: str) -> None:
    rows = quantize(torch.randn(5, 6 * size).numpy(), kind)
    tensor = WeightTensor("model.layers.0.linear_attn.out_proj.weight", (5, 6 * size), kind, rows)
    found = as_huggingface(tensor, StateSizes(4, 6 * size, 16, 6, 2))
    values = tensor.to_torch(torch.float32).view(5, 3, 2, size).transpose(1, 2).reshape(5, -1)
    assert found.format == encoded
    tolerance = 0.0 if encoded == kind else 0.02
    assert torch.allclose(found.to_torch(torch.float32), values, rtol=0, atol=tolerance)
    assert np.array_equal(found.part(slice(1, 3), slice(0, size)).to_numpy(), found.to_numpy()[1:3, :size])
    assert np.array_equal(found.part(slice(1, 3), slice(None)).to_numpy(), found.to_numpy()[1:3])


def test_rates_of_decay_that_are_none_are_refused() -> None:
    with pytest.raises(ModelFileError, match="a rate of decay is not below 0"):
        as_huggingface(stored("model.layers.0.linear_attn.A_log", torch.tensor([-1.0, 0.0])), None)


def test_rates_of_decay_have_the_same_bits_on_every_processor() -> None:
    rates = -torch.rand(1000, generator=torch.Generator().manual_seed(0)) - 0.01
    found = as_huggingface(stored("model.layers.0.linear_attn.A_log", rates), None).to_numpy()
    assert found.tolist() == [np.float32(math.log(-rate)) for rate in rates.tolist()]


def test_every_gguf_architecture_is_written_here() -> None:
    assert {gguf.MODEL_ARCH_NAMES[arch] for _, _, arch, _ in CASES.values()} == set(ARCHITECTURES)
