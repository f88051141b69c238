"""Codecs of GGUF keys: pairs of functions that make a field of a config.json of a stored value, and the opposite.

Must not know architectures. Next to read: `gguf_fields.py`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ModelFileError, UnsupportedModelError
from quire.weights.gguf_metadata import Metadata
from quire.weights.gguf_recurrent import StateSizes

Config = dict[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Codec:
    """A stored value and that of config.json, each made of the other.

    Fields:
        read: (metadata, key, default, the fields so far) -> the field; None for a key that is only written.
        write: (value, config) -> what is stored, None for no key; None for a key that is only read.
    """

    read: Callable[[Metadata, str, Any, Config], Any] | None
    write: Callable[[Any, Mapping[str, Any]], Any] | None = lambda value, config: value


def _read_width(metadata: Metadata, key: str, default: Any, config: Config) -> int:
    """Read MLP columns, or those of an expert where layers have no MLP."""
    return metadata.integer(key, metadata.values.get(metadata.key("expert_feed_forward_length")))


def _read_kv_heads(metadata: Metadata, key: str, default: Any, config: Config) -> int:
    """Read the KV heads of all layers; without a default those of layers that attend, the others having 0."""
    counts = [metadata.integer(key, default)] if default else metadata.counts(key, config["num_hidden_layers"])
    num_heads, num_kv_heads = config["num_attention_heads"], max(counts)
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{metadata.path}: {num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    return num_kv_heads


def _read_head_size(metadata: Metadata, key: str, default: Any, config: Config) -> int:
    head_size = metadata.integer(key, default)
    if head_size % 2:
        raise ModelFileError(f"{metadata.path}: the head size {head_size} is odd, so RoPE cannot pair its elements")
    return head_size


def _read_share(metadata: Metadata, key: str, default: Any, config: Config) -> float:
    """Read `partial_rotary_factor`: the share of a head that `rope.dimension_count` rotates."""
    head_size = config["head_dim"]
    rotated = metadata.integer(key, head_size)
    if rotated > head_size or rotated % 2:
        raise ModelFileError(
            f"{metadata.path}: {metadata.key(key)} is {rotated}, not an even number up to the {head_size} of a head"
        )
    share = rotated / head_size
    return share if int(head_size * share) == rotated else math.nextafter(share, 1.0)


def _read_types(metadata: Metadata, key: str, default: Any, config: Config) -> list[str]:
    pattern = metadata.pattern(key, default, config["num_hidden_layers"])
    return [SLIDING if is_sliding else FULL for is_sliding in pattern]


def _write_types(windows: Any, config: Mapping[str, Any]) -> list[bool] | None:
    pattern = [window is not None for window in windows]
    return pattern if any(pattern) else None


def _write_window(windows: Any, config: Mapping[str, Any]) -> int | None:
    """Return the window of the layers that have one. `windows`: of each layer, or one of all."""
    return windows if isinstance(windows, int) else next((window for window in windows if window is not None), None)


def same_as(name: str) -> Codec:
    """Return the codec of a size that must be that of another field; nothing is read."""

    def read(metadata: Metadata, key: str, default: Any, config: Config) -> None:
        if (length := metadata.integer(key, config[name])) != config[name]:
            raise UnsupportedModelError(
                f"{metadata.path}: {metadata.key(key)} is {length}, another size than the {config[name]} of a head"
            )

    return Codec(read)


def layers_with(kind: str) -> Codec:
    """Return the codec of KV heads by layer, 0 for those of the type `kind`, which have state."""

    def read(metadata: Metadata, key: str, default: Any, config: Config) -> list[str]:
        return [FULL if count else kind for count in metadata.counts(key, config["num_hidden_layers"])]

    return Codec(read, lambda recurrent, config: [0 if each else config["num_key_value_heads"] for each in recurrent])


COUNT = Codec(lambda metadata, key, default, config: metadata.integer(key, default))
"""At least 1."""
SIZE = Codec(lambda metadata, key, default, config: metadata.value(key, default))
"""0 or more; the model checks it."""
OPTIONAL = Codec(
    lambda metadata, key, default, config: metadata.integer(key) if metadata.is_set(key) else default,
    lambda value, config: value or None,
)
"""A count; 0 stands for none, like a missing key."""
NUMBER = Codec(lambda metadata, key, default, config: metadata.number(key, default), lambda value, config: float(value))
OPTIONAL_NUMBER = Codec(
    lambda metadata, key, default, config: metadata.number(key) if metadata.is_set(key) else default, NUMBER.write
)
FLAG = Codec(lambda metadata, key, default, config: metadata.flag(key, default=default))
ROTATES = Codec(lambda metadata, key, default, config: "rope" if metadata.flag(key, default=default) else "nope")
IS_SET = Codec(lambda metadata, key, default, config: metadata.is_set(key), None)
WRITTEN = Codec(None)
"""A key that reading does not need."""
BY_LAYER = Codec(lambda metadata, key, default, config: metadata.counts(key, config["num_hidden_layers"]))
LAYERS = Codec(lambda metadata, key, default, config: metadata.num_layers)
WIDTH = Codec(_read_width)
KV_HEADS = Codec(_read_kv_heads)
HEAD_SIZE = Codec(_read_head_size)
SHARE = Codec(_read_share, lambda share, config: int(config["head_dim"] * share))
WINDOW = Codec(OPTIONAL.read, _write_window)
TYPES = Codec(_read_types, _write_types)
"""`layer_types` of layers with and without a window; the default is the period of those without."""
READ_TYPES = Codec(_read_types, None)
STATE_HEAD_SIZE = Codec(lambda metadata, key, default, config: StateSizes.read(metadata).head_size)
"""Channels of a head; stored are those of all heads."""
