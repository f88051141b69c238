"""Translate GGUF metadata to the fields of a Hugging Face config.json, and check the tensors against it.

Strict: a metadata key of the architecture that is not understood here may change the mathematics, so it is an
`UnsupportedModelError`, and so is a tensor that has no place in the model. Must not decode weights.
Keys: `gguf.constants.Keys` of the gguf package. Next to read: `checkpoint.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, nearest, printable
from quire.weights.gguf_file import GGUFFile
from quire.weights.gguf_names import ROPE_FACTORS, huggingface_name

SUPPORTED_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NULL_TOKEN_ID = 0xFFFFFFFF
_UNDERSTOOD_KEYS = frozenset({
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "attention.causal", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "expert_count",
    "expert_used_count",
    # Without effect on the mathematics:
    "vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type",
})  # fmt: skip
LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_CONTEXT_LEN = 8192
"""Meta's values for RoPE; every published Llama 3.x has them, and only `factor` varies: 8 in 3.1, 32 in 3.2."""
_FACTOR_TOLERANCE = 1e-4
"""Relative; converters compute the factors in fp32 with other orders of operations."""

_SAMPLING_DEFAULTS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Typed access to the metadata; a value of the wrong type is a `ModelFileError`."""

    path: Path
    values: Mapping[str, Any]
    architecture: str

    def key(self, name: str) -> str:
        return name if name.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{name}"

    def value(self, name: str, default: Any) -> Any:
        value = self.values.get(self.key(name), default)
        if value is None:
            raise ModelFileError(f"{self.path}: the metadata key {self.key(name)} is missing")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """A count of at least 1; an array of equal counts, one per layer, is one count."""
        value = self.value(name, default)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise UnsupportedModelError(f"{self.path}: {self.key(name)} differs between layers")
            value = value[0]
        if type(value) is not int or value < 1:
            raise ModelFileError(f"{self.path}: {self.key(name)} is {printable(repr(value))}, not a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0. float32 values get their shortest decimal form: 1e-05, not 9.99999974e-06."""
        value = self.value(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ModelFileError(f"{self.path}: {self.key(name)} is {printable(repr(value))}, not a positive number")
        return float(str(np.float32(value)))

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """A token id of the tokenizer, or None when the model has no such token."""
        key = f"tokenizer.ggml.{name}"
        value = self.values.get(key)
        if value is None or value in (-1, NULL_TOKEN_ID):
            return None
        if type(value) is not int or not 0 <= value < vocab_size:
            raise ModelFileError(f"{self.path}: {key} is {printable(repr(value))}, outside the {vocab_size:,} tokens")
        return value


def translate_config(file: GGUFFile) -> dict[str, Any]:
    """Translate the metadata to the config.json that this model has, or would have, on the Hugging Face hub.

    Raises: UnsupportedModelError for another architecture or anything not understood; ModelFileError when a key is
    missing or of the wrong type, or a tensor is missing or of another shape than the metadata says.
    """
    metadata = _Metadata(file.path, file.metadata, _architecture(file))
    _check_keys(metadata)
    vocab_size = _vocab_size(file)
    num_layers = metadata.integer("block_count")
    hidden_size = metadata.integer("embedding_length")
    num_heads = metadata.integer("attention.head_count")
    head_size = metadata.integer("attention.key_length", max(hidden_size // num_heads, 1))
    config: dict[str, Any] = {
        "architectures": [SUPPORTED_ARCHITECTURES[metadata.architecture]],
        "model_type": metadata.architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.token_id("bos_token_id", vocab_size),
        "eos_token_id": metadata.token_id("eos_token_id", vocab_size),
    }
    _check_heads(metadata, config)
    config["rope_scaling"] = _rope_scaling(file, metadata, config)
    _add_architecture_fields(file, metadata, config)
    _check_tensors(file, config)
    return config


def translate_generation_config(file: GGUFFile, vocab_size: int) -> dict[str, Any]:
    """generation_config.json: every token that ends a turn, and the sampling defaults if the file has any."""
    metadata = _Metadata(file.path, file.metadata, "")
    ends = [metadata.token_id(name, vocab_size) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for gguf_name, name in _SAMPLING_DEFAULTS.items():
        value = file.metadata.get(f"general.sampling.{gguf_name}")
        if type(value) is int:
            config[name] = value
        elif isinstance(value, float) and math.isfinite(value):
            config[name] = float(str(np.float32(value)))
    return config


def _architecture(file: GGUFFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(f"{file.path}: the metadata key general.architecture is missing")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: the GGUF architecture '{printable(architecture, limit=80)}' is not supported"
            f"{nearest(architecture, SUPPORTED_ARCHITECTURES)}; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return architecture


def _check_keys(metadata: _Metadata) -> None:
    prefix = metadata.architecture + "."
    for key in metadata.values:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _UNDERSTOOD_KEYS:
            raise UnsupportedModelError(
                f"{metadata.path}: the metadata key '{printable(key)}' is not understood and may change the mathematics"
            )
    if metadata.values.get(prefix + "expert_count", 0) != 0:
        raise UnsupportedModelError(f"{metadata.path}: mixture-of-experts GGUF files are not supported yet")
    if metadata.values.get(prefix + "attention.causal", True) is not True:
        raise UnsupportedModelError(f"{metadata.path}: attention is not causal; Quire runs causal models only")


def _vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.path}: there is no matrix 'token_embd.weight'; is it a vocabulary-only file?")
    return embedding.shape[0]


def _check_heads(metadata: _Metadata, config: dict[str, Any]) -> None:
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config["head_dim"]
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{metadata.path}: {num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if head_size % 2:
        raise ModelFileError(f"{metadata.path}: the head size {head_size} is odd, so RoPE cannot pair its elements")
    for name in ("attention.value_length", "rope.dimension_count"):
        length = metadata.integer(name, head_size)
        if length != head_size:
            raise UnsupportedModelError(
                f"{metadata.path}: {metadata.key(name)} is {length}, another size than the {head_size} of a head"
            )


def _rope_scaling(file: GGUFFile, metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = metadata.values.get(metadata.key("rope.scaling.type"), "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope.scaling.type is {printable(repr(kind), limit=80)}; supported are none, linear, yarn"
        )
    scaling: dict[str, Any] | None = None
    if kind == "none" and metadata.key("rope.scale_linear") in metadata.values:
        kind = "linear"
    if kind != "none":
        factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
        scaling = {"rope_type": kind, "factor": factor} if factor != 1.0 else None
    if scaling is not None and kind == "yarn":
        original = metadata.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = original
    if ROPE_FACTORS not in file.tensors:
        return scaling
    if scaling is not None:
        raise UnsupportedModelError(f"{file.path}: both rope.scaling.type={kind} and '{ROPE_FACTORS}' scale RoPE")
    return _rope_factors(file, head_size=config["head_dim"], theta=config["rope_theta"])


def _rope_factors(file: GGUFFile, *, head_size: int, theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` whose divisors of the rotary frequencies are stored; None when they are all 1."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.format.name != "F32" or tensor.shape != (head_size // 2,):
        raise ModelFileError(
            f"{file.path}: '{ROPE_FACTORS}' is {tensor.format.name} {tensor.shape}, not F32 ({head_size // 2},)"
        )
    factors = np.frombuffer(file.rows(tensor).tobytes(), "<f4")
    if np.all(factors == 1):
        return None
    factor = float(str(np.float32(factors.max())))
    expected = llama3_factors(factor, head_size=head_size, theta=theta) if math.isfinite(factor) else math.nan
    if not np.allclose(factors, expected, rtol=_FACTOR_TOLERANCE, atol=0):
        raise UnsupportedModelError(
            f"{file.path}: the RoPE factors of '{ROPE_FACTORS}' are not those of Llama 3 scaling, the only kind known"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQ_FACTOR,
        "high_freq_factor": HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": ORIGINAL_CONTEXT_LEN,
    }


def _add_architecture_fields(file: GGUFFile, metadata: _Metadata, config: dict[str, Any]) -> None:
    has_window = metadata.values.get(metadata.key("attention.sliding_window"), 0) != 0
    window = metadata.integer("attention.sliding_window") if has_window else None
    if metadata.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
        if window is not None:
            # Llama with a sliding window is what Mistral is; its converter writes "llama" too.
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        return
    if metadata.architecture == "qwen2":
        if config["head_dim"] == config["hidden_size"] // config["num_attention_heads"]:
            del config["head_dim"]
    else:
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config |= {"use_sliding_window": has_window, "sliding_window": window}
    if has_window:
        config["max_window_layers"] = 0


def _check_tensors(file: GGUFFile, config: dict[str, Any]) -> None:
    """Check that the file has exactly the tensors of this model, each of the shape that the metadata give."""
    num_layers = config["num_hidden_layers"]
    if num_layers > len(file.tensors):
        raise ModelFileError(f"{file.path}: {num_layers:,} layers, but only {len(file.tensors)} tensors")
    expected = _expected_shapes(config)
    for name, shape in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{file.path}: tensor '{name}' is missing")
        if tensor.shape != shape:
            raise ModelFileError(
                f"{file.path}: tensor '{name}' has the shape {tensor.shape}, the metadata give {shape}"
            )
    for name in file.tensors:
        if name not in expected and name != ROPE_FACTORS:
            where = "in this model" if huggingface_name(name) else "in any supported one"
            raise UnsupportedModelError(f"{file.path}: tensor '{printable(name)}' has no place {where}")


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, mlp_width, vocab_size = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_size = config.get("head_dim", width // config["num_attention_heads"])
    query_rows = config["num_attention_heads"] * head_size
    kv_rows = config["num_key_value_heads"] * head_size
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (query_rows, width),
        "attn_k.weight": (kv_rows, width),
        "attn_v.weight": (kv_rows, width),
        "attn_output.weight": (width, query_rows),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (mlp_width, width),
        "ffn_up.weight": (mlp_width, width),
        "ffn_down.weight": (width, mlp_width),
    }
    is_qwen2 = config["model_type"] == "qwen2"
    biased = ["attn_q", "attn_k", "attn_v"] if is_qwen2 or config.get("attention_bias") else []
    biased += ["attn_output"] if config.get("attention_bias") else []
    biased += ["ffn_gate", "ffn_up", "ffn_down"] if config.get("mlp_bias") else []
    layer |= {f"{part}.bias": layer[f"{part}.weight"][:1] for part in biased}
    if config["model_type"] == "qwen3":
        layer |= {"attn_q_norm.weight": (head_size,), "attn_k_norm.weight": (head_size,)}
    shapes = {
        f"blk.{index}.{part}": shape for index in range(config["num_hidden_layers"]) for part, shape in layer.items()
    }
    shapes |= {"token_embd.weight": (vocab_size, width), "output_norm.weight": (width,)}
    return shapes if config["tie_word_embeddings"] else shapes | {"output.weight": (vocab_size, width)}


def llama3_factors(factor: float, *, head_size: int, theta: float) -> np.ndarray:
    """The divisors of the rotary frequencies in Llama 3 scaling.

    1 for wavelengths below 8192 / 4 tokens, `factor` above 8192 / 1, and 1 / ((1 - s) / factor + s) between, where
    s = (8192 / wavelength - 1) / (4 - 1). Shapes: float64 `[D / 2]`.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    smooth = (ORIGINAL_CONTEXT_LEN / wavelengths - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
