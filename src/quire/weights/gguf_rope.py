"""`rope_scaling`: the rotary fields of a config.json from GGUF metadata and from tensors of factors.

Next to read: `gguf_config.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.weights.gguf_file import GGUFFile
from quire.weights.gguf_metadata import Metadata
from quire.weights.gguf_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_CONTEXT_LEN = 8192
"""Meta's values for RoPE; every published Llama 3.x has them, and only `factor` varies: 8 in 3.1, 32 in 3.2."""
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
"""Hugging Face's mscale_all_dim where mscale is 1; 0 stands for neither."""
ATTENTION_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
FACTORS = ("rope.scaling.factor", "rope.scale_linear")
"""Of linear scaling and YaRN; 0 stands for none."""
_FACTOR_TOLERANCE = 1e-4
"""Relative; converters compute the factors in fp32 with other orders of operations."""


def rope_scaling(file: GGUFFile, metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config's `rope_scaling`, None for plain angles. Raises: UnsupportedModelError; ModelFileError."""
    if LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        return _longrope(file, metadata, config)
    kind = metadata.values.get(metadata.key("rope.scaling.type"), "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope.scaling.type is {printable(repr(kind), limit=80)}; supported are none, linear, yarn"
        )
    scaling: dict[str, Any] | None = None
    for name in ATTENTION_FACTORS:
        if kind != "yarn" and metadata.number(name, 1.0) != 1.0:
            raise UnsupportedModelError(f"{file.path}: {metadata.key(name)} is not 1, without YaRN")
    if kind == "none" and metadata.key("rope.scale_linear") in metadata.values:
        kind = "linear"
    if kind != "none":
        keys = [key for key in FACTORS if metadata.values.get(metadata.key(key), 0) != 0]
        factor = metadata.number(keys[0]) if keys else 1.0
        scaling = {"rope_type": kind, "factor": factor} if factor != 1.0 else None
    if scaling is not None and kind == "yarn":
        original = metadata.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = original
        scaling |= _yarn(metadata)
    if ROPE_FACTORS not in file.tensors:
        return scaling
    if scaling is not None:
        raise UnsupportedModelError(f"{file.path}: both rope.scaling.type={kind} and '{ROPE_FACTORS}' scale RoPE")
    return _rope_factors(file, head_size=config["head_dim"], theta=config["rope_theta"])


def rotated_share(metadata: Metadata, head_size: int) -> float:
    """Return `partial_rotary_factor`: the share of a head that `rope.dimension_count` rotates."""
    rotated = metadata.integer("rope.dimension_count", head_size)
    if rotated > head_size or rotated % 2:
        raise ModelFileError(
            f"{metadata.path}: {metadata.key('rope.dimension_count')} is {rotated}, not an even number up to the"
            f" {head_size} of a head"
        )
    share = rotated / head_size
    return share if int(head_size * share) == rotated else math.nextafter(share, 1.0)


def _yarn(metadata: Metadata) -> dict[str, Any]:
    """The further parameters of YaRN; converters copy Hugging Face's `attention_factor` to either of two keys."""
    if metadata.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{metadata.path}: {metadata.key('rope.scaling.yarn_ext_factor')} is not 1")
    names = {
        "rope.scaling.yarn_beta_fast": "beta_fast", "rope.scaling.yarn_beta_slow": "beta_slow",
        **dict.fromkeys(ATTENTION_FACTORS, "attention_factor"),
    }  # fmt: skip
    found = {ours: metadata.number(name) for name, ours in names.items() if metadata.has(name)}
    if metadata.value(LOG_MULTIPLIER, 0.0) != 0:
        found |= {"mscale": 1.0, "mscale_all_dim": metadata.number(LOG_MULTIPLIER)}
    return found


def _longrope(file: GGUFFile, metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    num_pairs = metadata.integer("rope.dimension_count", config["head_dim"]) // 2
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
    }
    for name, ours in ((SHORT_FACTORS, "short_factor"), (LONG_FACTORS, "long_factor")):
        if name not in file.tensors:
            raise ModelFileError(f"{file.path}: tensor '{name}' is missing")
        scaling[ours] = [float(str(factor)) for factor in _factors(file, name, num_pairs)]
    if metadata.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return scaling


def _factors(file: GGUFFile, name: str, count: int) -> np.ndarray:
    """The values of a tensor of divisors. Shapes: float32 `[count]`."""
    tensor = file.tensors[name]
    if tensor.format.name != "F32" or tensor.shape != (count,):
        raise ModelFileError(f"{file.path}: '{name}' is {tensor.format.name} {tensor.shape}, not F32 ({count},)")
    return np.frombuffer(file.rows(tensor).tobytes(), "<f4")


def _rope_factors(file: GGUFFile, *, head_size: int, theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` whose divisors of the rotary frequencies are stored; None when they are all 1."""
    factors = _factors(file, ROPE_FACTORS, head_size // 2)
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


def llama3_factors(factor: float, *, head_size: int, theta: float) -> np.ndarray:
    """The divisors of the rotary frequencies in Llama 3 scaling.

    1 for wavelengths below 8192 / 4 tokens, `factor` above 8192 / 1, and 1 / ((1 - s) / factor + s) between, where
    s = (8192 / wavelength - 1) / (4 - 1). Shapes: float64 `[D / 2]`.
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    smooth = (ORIGINAL_CONTEXT_LEN / wavelengths - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))
