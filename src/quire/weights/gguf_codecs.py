"""Codecs of GGUF keys: pairs of functions that make a field of a config.json of a stored value, and the opposite.

Must not know architectures. Next to read: `gguf_fields.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.errors import ModelFileError, UnsupportedModelError
from quire.weights.gguf_file import Metadata

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Codec:
    """A stored value and that of config.json, each made of the other.

    Fields:
        read: (metadata, key, default) -> the field; None for a key that is only written.
        write: value -> what is stored, None for no key; None for a key that is only read.
    """

    read: Callable[[Metadata, str, Any], Any] | None
    write: Callable[[Any], Any] | None = lambda value: value


def _read_optional(metadata: Metadata, key: str, default: Any) -> Any:
    return metadata.integer(key) if metadata.is_set(key) else default


def _read_kv_heads(metadata: Metadata, key: str, default: Any) -> int:
    """Read the KV heads of all layers; without a default those of layers that attend, the others having 0."""
    num_heads = metadata.fields["num_attention_heads"]
    num_kv_heads = max(metadata.counts(key)) if default is None else metadata.integer(key, default)
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{metadata.path}: {num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    return num_kv_heads


def _read_head_size(metadata: Metadata, key: str, default: Any) -> int:
    head_size = metadata.integer(key, default)
    if head_size % 2:
        raise ModelFileError(f"{metadata.path}: the head size {head_size} is odd, so RoPE cannot pair its elements")
    return head_size


def _read_share(metadata: Metadata, key: str, default: Any) -> float:
    """Read `partial_rotary_factor`: the share of a head that is rotated, whose size is the default."""
    rotated = metadata.integer(key, default)
    if rotated > default or rotated % 2:
        raise ModelFileError(
            f"{metadata.path}: {metadata.key(key)} is {rotated}, not an even number up to the {default} of a head"
        )
    return exact_share(rotated, default)


def exact_share(part: int, whole: int) -> float:
    """Return the share of which `int(whole * share)` is the part."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, 1.0)


def _read_types(metadata: Metadata, key: str, default: Any) -> list[str]:
    pattern = metadata.pattern(key, default, metadata.num_layers)
    return [SLIDING if is_sliding else FULL for is_sliding in pattern]


def _write_types(windows: Any) -> list[bool] | None:
    pattern = [window is not None for window in windows]
    return pattern if any(pattern) else None


def _write_window(windows: Any) -> int | None:
    """Return the window of the layers that have one. `windows`: of each layer, or one of all."""
    return windows if isinstance(windows, int) else next((window for window in windows if window is not None), None)


def _check_same(metadata: Metadata, key: str, default: Any) -> None:
    """Check a size that must be the default, the size of a head; it is no field."""
    if (length := metadata.integer(key, default)) != default:
        raise UnsupportedModelError(
            f"{metadata.path}: {metadata.key(key)} is {length}, another size than the {default} of a head"
        )


COUNT = Codec(Metadata.integer)
"""At least 1."""
SIZE = Codec(_read_optional)
"""0 or more, with a default of 0."""
OPTIONAL = Codec(_read_optional, lambda value: value or None)
"""A count; 0 stands for none, like a missing key."""
NUMBER = Codec(Metadata.number, float)
OPTIONAL_NUMBER = Codec(lambda metadata, key, default: metadata.number(key) if metadata.is_set(key) else default, float)
FLAG = Codec(Metadata.flag)
IS_SET = Codec(lambda metadata, key, default: metadata.is_set(key), None)
WRITTEN = Codec(None)
"""A key that has no field; files may lack it."""
SAME = Codec(_check_same)
LAYERS = Codec(lambda metadata, key, default: metadata.num_layers)
BY_LAYER = Codec(lambda metadata, key, default: metadata.counts(key))
WIDTH = Codec(lambda metadata, key, default: metadata.integer(key, metadata.get("expert_feed_forward_length", default)))
"""MLP columns, or those of an expert where layers have no MLP."""
KV_HEADS = Codec(_read_kv_heads)
HEAD_SIZE = Codec(_read_head_size)
SHARE = Codec(_read_share)
WINDOW = Codec(_read_optional, _write_window)
TYPES = Codec(_read_types, _write_types)
"""`layer_types` of layers with and without a window; the default is the period of those without."""
READ_TYPES = Codec(_read_types, None)
