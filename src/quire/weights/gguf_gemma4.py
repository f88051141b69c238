"""`gemma4_fields`, `gemma4_keys`: Gemma 4 in GGUF, whose head size, KV heads and MLP columns differ by layer.

Next to read: `gguf_fields.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError
from quire.weights.gguf_file import GGUFFile
from quire.weights.gguf_metadata import Metadata
from quire.weights.gguf_names import ROPE_FACTORS

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"
NO_ROTATION = 1e20
"""A divisor of rotary frequencies above this stands for a frequency of 0."""


def gemma4_fields(file: GGUFFile, metadata: Metadata, config: Config) -> None:
    """See `gguf_fields.add_fields`."""
    num_layers, full_head_size = config["num_hidden_layers"], config["head_dim"]
    pattern = metadata.pattern("attention.sliding_window_pattern", 6, num_layers)
    types = [SLIDING if is_sliding else FULL for is_sliding in pattern]
    num_shared = metadata.value("attention.shared_kv_layers", 0)
    head_size = metadata.integer("attention.key_length_swa", full_head_size)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.integer(name, head_size) != head_size:
            raise UnsupportedModelError(f"{file.path}: {metadata.key(name)} is not {head_size}, the size of a head")
    kv_heads = metadata.counts("attention.head_count_kv", num_layers)
    widths = metadata.counts("feed_forward_length", num_layers)
    num_own = num_layers - num_shared
    widens = num_shared > 0 and widths[-1] != widths[0]
    by_type = dict(zip(types, kv_heads, strict=True))
    if kv_heads != [by_type[kind] for kind in types] or widths != [
        widths[0] * (2 if widens and index >= num_own else 1) for index in range(num_layers)
    ]:
        raise UnsupportedModelError(f"{file.path}: KV heads or MLP columns differ between layers of one kind")
    theta, table = config.pop("rope_theta"), file.tensors.get("per_layer_token_embd.weight")
    del config["hidden_act"], config["rope_scaling"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "sliding_window": metadata.integer("attention.sliding_window"),
        "head_dim": head_size,
        "global_head_dim": full_head_size,
        "num_key_value_heads": by_type.get(SLIDING, by_type.get(FULL)),
        "num_global_key_value_heads": by_type.get(FULL),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widens,
        "num_kv_shared_layers": num_shared,
        "attention_k_eq_v": any(
            kind == FULL and index < num_own and f"blk.{index}.attn_v.weight" not in file.tensors
            for index, kind in enumerate(types)
        ),
        "hidden_size_per_layer_input": metadata.value("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": _rotated_share(file, full_head_size),
            },
        },
    }
    if metadata.value("expert_count", 0):
        config |= {"enable_moe_block": True, "moe_intermediate_size": metadata.integer("expert_feed_forward_length")}
    if metadata.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    if config["num_global_key_value_heads"] != config["num_key_value_heads"] and not config["attention_k_eq_v"]:
        config["per_layer_config"] = {
            str(index): {"head_dim": full_head_size, "num_key_value_heads": by_type[FULL]}
            for index, kind in enumerate(types)
            if kind == FULL
        }


def _rotated_share(file: GGUFFile, head_size: int) -> float:
    """The share of a head that is rotated: the first pairs, whose frequencies are divided by 1."""
    if ROPE_FACTORS not in file.tensors:
        return 1.0
    tensor, num_pairs = file.tensors[ROPE_FACTORS], head_size // 2
    if tensor.format.name != "F32" or tensor.shape != (num_pairs,):
        raise ModelFileError(f"{file.path}: '{ROPE_FACTORS}' is {tensor.shape}, not F32 ({num_pairs},)")
    factors = np.frombuffer(file.rows(tensor).tobytes(), "<f4")
    rotated = int((factors == 1).sum())
    if not rotated or not np.all(factors[:rotated] == 1) or not np.all(factors[rotated:] > NO_ROTATION):
        raise UnsupportedModelError(f"{file.path}: '{ROPE_FACTORS}' is not ones, then divisors that leave no rotation")
    share = rotated / num_pairs
    return share if int(share * head_size // 2) == rotated else math.nextafter(share, 1.0)


def gemma4_keys(config: Mapping[str, Any], read: Any) -> dict[str, Any]:
    """Return the keys without the architecture's name. `read`: the model's `Config`."""
    layers = [read.of_layer(index) for index in range(read.num_layers)]
    keys = {
        "attention.key_length": read.full_head_size,
        "attention.value_length": read.full_head_size,
        "attention.key_length_swa": read.head_size,
        "attention.value_length_swa": read.head_size,
        "attention.head_count_kv": [layer.num_kv_heads for layer in layers],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [window is not None for window in read.windows],
        "attention.shared_kv_layers": sum(index != source for index, source in enumerate(read.sources)),
        "embedding_length_per_layer_input": read.per_layer_size,
        "feed_forward_length": [layer.intermediate_size for layer in layers],
        "rope.dimension_count": read.full_head_size,
        "rope.dimension_count_swa": read.head_size,
        "rope.freq_base": float(read.rope.theta),
        "rope.freq_base_swa": float(read.local_rope.theta),
    }
    experts = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    sizes = read.num_experts, read.top_k, read.expert_size
    return keys | (dict(zip(experts, sizes, strict=True)) if read.num_experts else {})


def rotary_divisors(rotated_share: float, head_size: int) -> np.ndarray:
    """Return divisors of frequencies that leave the pairs behind the first ones unrotated. Shapes: float32 [D / 2]."""
    rotated = int(rotated_share * head_size // 2)
    return np.array([1.0] * rotated + [1e30] * (head_size // 2 - rotated), np.float32)
