"""`read_rope`: the rotary fields of a `config.json`, in the spellings of transformers 4 and 5.

Next to read: `layers/rotary.py` for what the fields mean.
"""

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelFileError, UnsupportedModelError, nearest
from quire.layers.rotary import RopeConfig
from quire.models.hf_config import HFConfigReader, check_positive

PARAMETERS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        "original_max_position_embeddings": "original_context_len",
    },
}
"""Per supported `rope_type` its parameters, all required, and their names in `RopeConfig`."""


def read_rope(
    reader: HFConfigReader,
    *,
    theta_name: str = "rope_theta",
    share_name: str = "partial_rotary_factor",
    share: float | None = None,
) -> RopeConfig:
    """Rotary angles: `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5).

    `theta_name`, `share_name`: transformers 4's fields; `share`: the default of the latter, None where whole heads are
    rotated.
    Raises: UnsupportedModelError for angles that are not computed here; ModelFileError.
    """
    reader.require("rope_interleaved", False)
    values: dict[str, Any] = {
        "rope_theta": reader.number(theta_name, 10000.0),
        "partial_rotary_factor": reader.number(share_name, share or 1.0),
    }
    for name in ("rope_scaling", "rope_parameters"):
        found = reader.raw(name) or {}
        if not isinstance(found, Mapping) or any(isinstance(value, Mapping) for value in found.values()):
            raise UnsupportedModelError(f"the model's config has {name}={str(found)[:80]}; expected plain numbers")
        values |= {key: value for key, value in found.items() if value is not None}
    # transformers 4 wrote `type` before it wrote `rope_type`, and sometimes writes both.
    old_kind = values.pop("type", "default")
    kind = values.pop("rope_type", old_kind)
    if kind not in PARAMETERS:
        raise UnsupportedModelError(
            f"rope_type {kind!r} is not supported{nearest(str(kind), PARAMETERS)}; "
            f"supported are {', '.join(PARAMETERS)}"
        )
    config = _rope_config(kind, values)
    if share is None and config.rotated_share != 1:
        raise UnsupportedModelError(
            f"the model's config has partial_rotary_factor={config.rotated_share}; Quire's {reader.model_type} rotates"
            " whole heads"
        )
    return config


def _rope_config(kind: str, values: dict[str, Any]) -> RopeConfig:
    theta = check_positive("rope_theta", values.pop("rope_theta"))
    share = check_positive("partial_rotary_factor", values.pop("partial_rotary_factor"))
    if share > 1:
        raise ModelFileError(f"the model's config has partial_rotary_factor={share}, which is not a number up to 1")
    numbers: dict[str, Any] = {}
    for name, ours in PARAMETERS[kind].items():
        if name not in values:
            raise ModelFileError(f"the model's config lacks {name} among its rope parameters, which {kind} needs")
        numbers[ours] = check_positive(name, values.pop(name))
    values.pop("original_max_position_embeddings", None)  # written with every kind, read by llama3 only
    if values:
        name, value = next(iter(values.items()))
        raise UnsupportedModelError(f"rope parameter {name}={value!r} is not supported with rope_type {kind!r}")
    return RopeConfig(theta=theta, kind=kind, rotated_share=share, **numbers)
