"""`read_rope`: the rotary fields of a `config.json`, in the spellings of transformers 4 and 5.

Next to read: `layers/rotary.py` for what the fields mean.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from quire.errors import ModelFileError, UnsupportedModelError, nearest
from quire.layers.rotary import RopeConfig
from quire.models.hf_config import FULL, SLIDING, HFConfigReader, check_positive, wrong

PARAMETERS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_context_len",
    },
    "yarn": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "longrope": {"short_factor": "short_factors", "long_factor": "long_factors"},
    "proportional": {},
}
"""Per supported `rope_type` its required parameters, and their names in `RopeConfig`."""
OPTIONAL = {
    "yarn": {"attention_factor": "attention_factor", "beta_fast": "fast_turns", "beta_slow": "slow_turns"},
    "longrope": {"attention_factor": "attention_factor"},
    "proportional": {"factor": "factor"},
}
"""Further numbers of a `rope_type`."""
ORIGINAL = "original_max_position_embeddings"


def read_rope(
    reader: HFConfigReader,
    *,
    theta_name: str = "rope_theta",
    share_name: str = "partial_rotary_factor",
    rotates_part: bool = False,
    default_original: int | None = None,
    renames: Mapping[str, str] | None = None,
    ignored: Collection[str] = (),
) -> RopeConfig:
    """Rotary angles: `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5).

    `theta_name`, `share_name`: transformers 4's fields; `rotates_part`: a share of each head may be rotated alone;
    `default_original`: tokens of the original context; `renames`: other names of a type; `ignored`: parameters that the
    model does not need, or reads itself.
    Raises: UnsupportedModelError for angles that are not computed here; ModelFileError.
    """
    values: dict[str, Any] = {
        "rope_theta": reader.number(theta_name, 10000.0),
        "partial_rotary_factor": reader.number(share_name, 1.0),
    }
    for name in ("rope_scaling", "rope_parameters"):
        values |= parameters_of(reader, name)
    for name in ignored:
        values.pop(name, None)
    for name in ("type", "rope_type"):
        if isinstance(kind := values.get(name), str):
            values[name] = (renames or {}).get(kind, kind)
    if default_original is not None:
        values.setdefault(ORIGINAL, default_original)
    config = make_rope(reader, values)
    if not rotates_part and config.rotated_share != 1:
        raise UnsupportedModelError(
            f"the model's config has partial_rotary_factor={config.rotated_share}; Quire's {reader.model_type} rotates"
            " whole heads"
        )
    return config


def read_rope_of_type(
    reader: HFConfigReader, layer_type: str, *, theta_name: str = "rope_theta", theta: float
) -> RopeConfig:
    """Rotary angles of one layer type: `rope_parameters` has them by layer type (transformers 5).

    transformers 4 has `theta_name`, and `rope_scaling` for layers without a window.
    """
    values: dict[str, Any] = {"rope_theta": reader.number(theta_name, theta)}
    if layer_type == FULL:
        values |= parameters_of(reader, "rope_scaling")
    return make_rope(reader, values | parameters_of(reader, "rope_parameters", layer_type))


def parameters_of(reader: HFConfigReader, name: str, layer_type: str | None = None) -> dict[str, Any]:
    """Return the parameters in one field that are not null: of one layer type if the field has them by layer type."""
    found = reader.raw(name) or {}
    if layer_type is not None and isinstance(found, Mapping):
        if unknown := [key for key in found if key not in (FULL, SLIDING)]:
            raise UnsupportedModelError(f"the model's config has {name}.{unknown[0]}; expected {FULL} and {SLIDING}")
        found = found.get(layer_type) or {}
    if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
        raise UnsupportedModelError(f"the model's config has {name}={str(found)[:80]}; expected plain numbers")
    return {key: value for key, value in found.items() if value is not None}


def make_rope(reader: HFConfigReader, values: dict[str, Any]) -> RopeConfig:
    """The angles of these parameters, `rope_theta` and `partial_rotary_factor` among them.

    Raises: UnsupportedModelError for a type or parameter that is not known; ModelFileError.
    """
    reader.require("rope_interleaved", False)
    values = dict(values)
    # transformers 4 wrote `type` before it wrote `rope_type`, and sometimes writes both.
    old_kind = values.pop("type", "default")
    kind = values.pop("rope_type", old_kind)
    if not isinstance(kind, str) or kind not in PARAMETERS:
        raise UnsupportedModelError(
            f"rope_type {kind!r} is not supported{nearest(str(kind), PARAMETERS)}; "
            f"supported are {', '.join(PARAMETERS)}"
        )
    theta = check_positive("rope_theta", values.pop("rope_theta"))
    share = check_positive("partial_rotary_factor", values.pop("partial_rotary_factor", 1.0))
    if share > 1:
        raise wrong("partial_rotary_factor", share, "a number up to 1")
    context_len = reader.optional_integer("max_position_embeddings") or 0
    # Some models have the field beside the parameters; it then takes precedence, as in Transformers.
    original = reader.optional_integer(ORIGINAL) or values.get(ORIGINAL)
    if original is not None:
        values[ORIGINAL] = original
    numbers: dict[str, Any] = {}
    for name, ours in PARAMETERS[kind].items():
        if name not in values:
            raise ModelFileError(f"the model's config lacks {name} among its rope parameters, which {kind} needs")
        value = values.pop(name)
        numbers[ours] = _factors(name, value) if ours.endswith("factors") else check_positive(name, value)
    for name, ours in OPTIONAL.get(kind, {}).items():
        if name in values:
            numbers[ours] = check_positive(name, values.pop(name))
    original = values.pop(ORIGINAL, context_len)  # written with every kind
    if kind in ("yarn", "longrope"):
        numbers["original_context_len"] = check_positive(ORIGINAL, original)
    if kind == "llama3" and numbers["high_frequency_factor"] <= numbers["low_frequency_factor"]:
        raise wrong("high_freq_factor", numbers["high_frequency_factor"], "above low_freq_factor")
    if kind == "yarn":
        numbers |= _yarn(values, numbers, theta)
    elif kind == "longrope":
        numbers |= _longrope(values, numbers, context_len)
    elif kind == "dynamic":
        numbers |= {"original_context_len": check_positive("max_position_embeddings", context_len)}
    if values:
        name, value = next(iter(values.items()))
        raise UnsupportedModelError(f"rope parameter {name}={value!r} is not supported with rope_type {kind!r}")
    rope = RopeConfig(theta=theta, kind=kind, rotated_share=share, **numbers)
    return rope.for_length(rope.stretched(context_len))


def check_pairs(rope: RopeConfig, head_size: int, share_name: str = "partial_rotary_factor") -> None:
    """Raises: ModelFileError unless an even number of each head's dimensions is rotated, with a factor per pair."""
    size = rope.rotated_size(head_size)
    if size % 2 or not size:
        shown = f"{rope.rotated_share}, {size} of the {head_size} dimensions of a head"
        raise wrong(share_name, shown, "a positive even number: they are rotated in pairs")
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != size // 2:
            raise ModelFileError(
                f"the model's config has {len(factors)} numbers in {name}, but {size // 2} frequencies are rotated by"
            )


def _factors(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise wrong(name, value, "a list of numbers")
    return tuple(check_positive(name, item) for item in value)


def _yarn(values: dict[str, Any], numbers: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """The factor of cosines and sines, 0.1 ln(factor) + 1 unless it is given (Peng 2023, sec. 3.4), and the ramp."""
    scales = [values.pop(name, None) for name in ("mscale", "mscale_all_dim")]
    truncates = values.pop("truncate", True)
    if not isinstance(truncates, bool):
        raise wrong("truncate", repr(truncates), "true or false")
    if theta <= 1:
        raise ModelFileError(f"the model's config has rope_theta={theta}, which must be above 1 with yarn")
    found = {"truncates": truncates}
    if "attention_factor" in numbers:
        return found
    growth = 0.1 * math.log(max(numbers["factor"], 1.0))
    if all(scales):
        over, under = (check_positive("mscale", scale) * growth + 1 for scale in scales)
        return found | {"attention_factor": over / under}
    return found | {"attention_factor": growth + 1}


def _longrope(values: dict[str, Any], numbers: Mapping[str, Any], context_len: int) -> dict[str, Any]:
    """The factor of cosines and sines, sqrt(1 + ln(factor) / ln(original)) unless it is given (Abdin 2024)."""
    original = numbers["original_context_len"]
    factor = check_positive("factor", values.pop("factor", context_len / original))
    if "attention_factor" in numbers or factor <= 1:
        return {}
    if original <= 1:
        raise wrong(ORIGINAL, f"{original:g}", "above 1")
    return {"attention_factor": math.sqrt(1 + math.log(factor) / math.log(original))}
