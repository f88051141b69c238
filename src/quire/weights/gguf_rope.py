"""The rotary angles of a config.json from GGUF keys and tensors of factors, and those of a config.json.

Several keys and tensors are one field, so that rows alone do not say it: `rope_scaling` reads, `rope_keys` writes. Next
to read: `gguf_fields.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.weights.gguf_codecs import COUNT, FULL, NUMBER, OPTIONAL_NUMBER, SLIDING
from quire.weights.gguf_fields import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, Field, write_fields
from quire.weights.gguf_file import GGUFFile, Metadata

LOW_FREQ_FACTOR = 1.0
HIGH_FREQ_FACTOR = 4.0
ORIGINAL_CONTEXT_LEN = 8192
"""Meta's values for RoPE; every published Llama 3.x has them, and only `factor` varies: 8 in 3.1, 32 in 3.2."""
LOG_MULTIPLIER = Field("rope.scaling.yarn_log_multiplier", "mscale_all_dim", OPTIONAL_NUMBER)
"""Of models with an mscale of 1 beside it; 0 stands for neither."""
TEMPERATURE = Field("attention.temperature_scale", "llama_4_scaling_beta", NUMBER)
FACTOR = Field("rope.scaling.factor", "factor", NUMBER)
ORIGINAL = Field("rope.scaling.original_context_length", "original_max_position_embeddings", COUNT)
TURNS = (
    Field("rope.scaling.yarn_beta_fast", "beta_fast", NUMBER),
    Field("rope.scaling.yarn_beta_slow", "beta_slow", NUMBER),
)
ATTENTION_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
FACTORS = (FACTOR.key, "rope.scale_linear")
"""Of linear scaling and YaRN; 0 stands for none."""
UNROTATED = 1e30
"""A divisor that leaves nothing of a frequency."""
_FACTOR_TOLERANCE = 1e-4
"""Relative; converters compute the factors in fp32 with other orders of operations."""


def rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    """Return the config's `rope_scaling`, None for plain angles. Raises: UnsupportedModelError; ModelFileError."""
    file = metadata.file
    if LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        return _longrope(metadata)
    kind = metadata.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope.scaling.type is {printable(repr(kind), limit=80)}; supported are none, linear, yarn"
        )
    scaling: dict[str, Any] | None = None
    for name in ATTENTION_FACTORS:
        if kind != "yarn" and metadata.number(name, 1.0) != 1.0:
            raise UnsupportedModelError(f"{file.path}: {metadata.key(name)} is not 1, without YaRN")
    if kind == "none" and metadata.has("rope.scale_linear"):
        kind = "linear"
    if kind != "none":
        keys = [key for key in FACTORS if metadata.is_set(key)]
        factor = metadata.number(keys[0]) if keys else 1.0
        scaling = {"rope_type": kind, "factor": factor} if factor != 1.0 else None
    if scaling is not None and kind == "yarn":
        scaling[ORIGINAL.name] = metadata.integer(ORIGINAL.key, metadata.fields["max_position_embeddings"])
        scaling |= _yarn(metadata)
    if ROPE_FACTORS not in file.tensors:
        return scaling
    if scaling is not None:
        raise UnsupportedModelError(f"{file.path}: both rope.scaling.type={kind} and '{ROPE_FACTORS}' scale RoPE")
    return _rope_factors(file, head_size=metadata.fields["head_dim"], theta=metadata.fields["rope_theta"])


def _yarn(metadata: Metadata) -> dict[str, Any]:
    """The further parameters of YaRN; converters copy Hugging Face's `attention_factor` to either of two keys."""
    if metadata.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{metadata.path}: {metadata.key('rope.scaling.yarn_ext_factor')} is not 1")
    names = {**{row.key: row.name for row in TURNS}, **dict.fromkeys(ATTENTION_FACTORS, "attention_factor")}
    found = {ours: metadata.number(name) for name, ours in names.items() if metadata.has(name)}
    if metadata.is_set(LOG_MULTIPLIER.key):
        found |= {"mscale": 1.0, LOG_MULTIPLIER.name: metadata.number(LOG_MULTIPLIER.key)}
    return found


def _longrope(metadata: Metadata) -> dict[str, Any]:
    num_pairs = metadata.integer("rope.dimension_count", metadata.fields["head_dim"]) // 2
    scaling: dict[str, Any] = {"rope_type": "longrope", ORIGINAL.name: metadata.integer(ORIGINAL.key)}
    for name, ours in ((SHORT_FACTORS, "short_factor"), (LONG_FACTORS, "long_factor")):
        if name not in metadata.file.tensors:
            raise ModelFileError(f"{metadata.path}: tensor '{name}' is missing")
        scaling[ours] = [float(str(factor)) for factor in read_factors(metadata.file, name, num_pairs)]
    if metadata.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return scaling


def read_factors(file: GGUFFile, name: str, count: int) -> np.ndarray:
    """The values of a tensor of divisors. Shapes: float32 `[count]`."""
    tensor = file.tensors[name]
    if tensor.format.name != "F32" or tensor.shape != (count,):
        raise ModelFileError(f"{file.path}: '{name}' is {tensor.format.name} {tensor.shape}, not F32 ({count},)")
    return np.frombuffer(file.rows(tensor).tobytes(), "<f4")


def _rope_factors(file: GGUFFile, *, head_size: int, theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` whose divisors of the rotary frequencies are stored; None when they are all 1."""
    factors = read_factors(file, ROPE_FACTORS, head_size // 2)
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
        ORIGINAL.name: ORIGINAL_CONTEXT_LEN,
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


# --- What single architectures have besides ---------------------------------------------------


def finish_gpt_oss(metadata: Metadata) -> None:
    """Set YaRN's `truncate` as published; files do not say. Mutates: metadata."""
    if metadata.fields["rope_scaling"] is not None:
        metadata.fields["rope_scaling"]["truncate"] = False


def finish_deepseek(metadata: Metadata) -> None:
    """Multiply `mscale_all_dim`, of which files have a tenth, and mscale, the same in all published models."""
    if (scaling := metadata.fields["rope_scaling"]) is not None and LOG_MULTIPLIER.name in scaling:
        scaling |= dict.fromkeys(("mscale", LOG_MULTIPLIER.name), round(10 * scaling[LOG_MULTIPLIER.name], 6))


def finish_ministral(metadata: Metadata) -> None:
    """Add the growth of queries behind the original context. Mutates: metadata."""
    scaling = metadata.fields["rope_scaling"] = metadata.fields["rope_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn" and not metadata.has(LOG_MULTIPLIER.key):
        scaling.setdefault("attention_factor", 1.0)  # llama.cpp then divides by the factor that YaRN has
    scaling[ORIGINAL.name] = metadata.integer(ORIGINAL.key, metadata.fields["max_position_embeddings"])
    scaling[TEMPERATURE.name] = metadata.number(TEMPERATURE.key)


def finish_olmo3(metadata: Metadata) -> None:
    """Make the angles of layers with and without a window, of which the former are not scaled. Mutates: metadata."""
    fields, plain = metadata.fields, {"rope_type": "default"}
    fields["rope_parameters"] = {
        FULL: {"rope_theta": fields["rope_theta"], **(fields["rope_scaling"] or plain)},
        SLIDING: {"rope_theta": fields["rope_local_base_freq"], **plain},
    }


# --- Writing ----------------------------------------------------------------------------------


def rope_keys(config: Mapping[str, Any], read: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the keys of scaled angles, and tensors of divisors. `read`: the model's `Config`.

    Shapes: float32 `[D / 2]`. Raises: UnsupportedModelError; ModelFileError for missing parameters.
    """
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope = {name: value for name, value in rope.get(FULL, rope).items() if value}
    angles: Any = getattr(read, "rope", None)
    kind = angles.kind if angles is not None else rope.get("rope_type", rope.get("type", "default"))
    keys, factors = write_fields((TEMPERATURE,), rope, None), dict[str, Any]()
    if kind in ("linear", "yarn"):
        if "factor" not in rope:
            raise ModelFileError(f"config.json: {kind} rope scaling lacks 'factor'")
        _check_attention_factor(rope)
        if hasattr(read, "kv_rank") and LOG_MULTIPLIER.name in rope:
            rope[LOG_MULTIPLIER.name] *= 0.1  # see `finish_deepseek`
        rows = (FACTOR, ORIGINAL, *TURNS, LOG_MULTIPLIER) if kind == "yarn" else (FACTOR,)
        keys |= {"rope.scaling.type": kind, **write_fields(rows, rope, None)}
    elif kind == "llama3":
        factors = {ROPE_FACTORS: llama3_factors(angles.factor, head_size=read.head_size, theta=angles.theta)}
    elif kind == "proportional":
        num_pairs, rotated = read.full_head_size // 2, int(angles.rotated_share * read.full_head_size // 2)
        factors = {ROPE_FACTORS: np.where(np.arange(num_pairs) < rotated, 1.0, UNROTATED)}
    elif kind == "longrope":
        factors = {LONG_FACTORS: np.array(angles.long_factors), SHORT_FACTORS: np.array(angles.short_factors)}
        keys[ORIGINAL.key] = int(angles.original_context_len)
        keys[ATTENTION_FACTORS[0]] = float(angles.attention_factor)
    elif kind != "default":
        raise UnsupportedModelError(f"rotary scaling '{kind}' is not written to GGUF here; use llama.cpp's converter")
    return keys, {name: values.astype(np.float32) for name, values in factors.items()}


def _check_attention_factor(rope: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a factor that YaRN does not have by itself: llama.cpp would multiply both."""
    given = rope.get("attention_factor")
    if given is not None and abs(given - (0.1 * math.log(rope["factor"]) + 1)) > 1e-6:
        raise UnsupportedModelError(
            f"rotary scaling with attention_factor={given} is not written to GGUF here: llama.cpp would compute another"
        )
