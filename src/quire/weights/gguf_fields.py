"""Rows that say which GGUF key is which field of a config.json, read in both directions, and those of Llama.

A row is `Field(key, name, codec, default)`: `read_fields` makes config.json's field `name` of the key, `write_fields`
the key of the field. A codec is a pair of functions (`gguf_codecs.py`). What llama.cpp takes for granted where a key is
missing is the row's default. To add an architecture is to write rows: those that it has beside Llama's, or in place of
them. What a row cannot say, because it looks at several keys or at tensors, is the architecture's function `finish`.
Next to read: `gguf_architectures.py`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.weights import gguf_codecs as codecs
from quire.weights.gguf_codecs import Codec
from quire.weights.gguf_metadata import Metadata


@dataclass(frozen=True, slots=True)
class Field:
    """A key of an architecture, without its name before it, and the field of config.json that says the same.

    Fields:
        name: of the field; "" if reading only checks the value.
        default: of a missing key: a number, the name of a field so far, or a function of them; None for a key that must
            be there.
        attribute: what is written: dotted names in the model's `Config`, "" for `name`, or a function of it. One that
            is not there stands for the field of config.json.
    """

    key: str
    name: str
    codec: Codec = codecs.COUNT
    default: Any = None
    attribute: str | Callable[[Any], Any] = ""

    def value(self, config: Mapping[str, Any], read: Any) -> Any:
        """Return what is to be written, None for nothing. `read`: the model's `Config`."""
        if not isinstance(self.attribute, str):
            return self.attribute(read)
        parts = (self.attribute or self.name).split(".")
        found = functools.reduce(lambda each, part: getattr(each, part, None), parts, read)
        return config.get(self.name) if found is None else found


def read_fields(fields: Iterable[Field], metadata: Metadata) -> None:
    """Read the rows. Mutates: metadata.fields. Raises: ModelFileError, UnsupportedModelError."""
    for field in fields:
        if field.codec.read is None:
            continue
        default = field.default(metadata.fields) if callable(field.default) else field.default
        default = metadata.fields[default] if isinstance(default, str) else default
        value = field.codec.read(metadata, field.key, default)
        if field.name:
            metadata.fields[field.name] = value


def write_fields(fields: Iterable[Field], config: Mapping[str, Any], read: Any) -> dict[str, Any]:
    """Return the keys of a config; of two rows with one key, the second counts. `read`: the model's `Config`."""
    keys = {}
    for field in fields:
        value = field.value(config, read) if field.codec.write is not None else None
        if field.codec.write is not None and value is not None and (stored := field.codec.write(value)) is not None:
            keys[field.key] = stored
    return keys


SIZES = (
    Field("vocab_size", "vocab_size", codecs.WRITTEN),
    Field("block_count", "num_hidden_layers", codecs.LAYERS, attribute="num_layers"),
    Field("embedding_length", "hidden_size"),
)
KV_HEADS = Field(
    "attention.head_count_kv", "num_key_value_heads", codecs.KV_HEADS, "num_attention_heads", "num_kv_heads"
)
EPSILON = Field("attention.layer_norm_rms_epsilon", "rms_norm_eps", codecs.NUMBER, attribute="rms_norm_epsilon")
ROTATED_SHARE = Field(
    "rope.dimension_count",
    "partial_rotary_factor",
    codecs.SHARE,
    "head_dim",
    lambda read: read.rope.rotated_size(read.head_size),
)
"""Of architectures that may rotate the first dimensions of a head alone."""
LLAMA = (
    *SIZES,
    Field("context_length", "max_position_embeddings"),
    Field("feed_forward_length", "intermediate_size", codecs.WIDTH),
    Field("attention.head_count", "num_attention_heads", attribute="num_heads"),
    KV_HEADS,
    Field(
        "attention.key_length",
        "head_dim",
        codecs.HEAD_SIZE,
        lambda fields: max(fields["hidden_size"] // fields["num_attention_heads"], 1),
        "head_size",
    ),
    Field("attention.value_length", "", codecs.SAME, "head_dim", "head_size"),
    Field("rope.dimension_count", "", codecs.SAME, "head_dim", "head_size"),
    Field("rope.freq_base", "rope_theta", codecs.NUMBER, 10000.0, "rope.theta"),
    EPSILON,
)
