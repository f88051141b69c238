"""Rows that say which GGUF key is which field of a config.json, names of tensors, both read in both directions, and
those of Llama.

A row is `Field(key, name, codec, default)`: `read_fields` makes config.json's field `name` of the key, `write_fields`
the key of the field. A codec is a pair of functions (`gguf_codecs.py`). What llama.cpp takes for granted where a key is
missing is the row's default. To add an architecture is to write rows: those that it has beside Llama's, or in place of
them. What a row cannot say, because it looks at several keys or at tensors, is the architecture's function `finish`.
Next to read: `gguf_architectures.py`.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.weights import gguf_codecs as codecs
from quire.weights.gguf_codecs import Codec
from quire.weights.gguf_file import Metadata


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


# --- Names of tensors, and the order of rotary rows -----------------------------------------------
# llama.cpp rotates neighbouring pairs (0, 1), (2, 3), … of a head where Hugging Face rotates (0, D/2), (1, D/2 + 1), …;
# its converter therefore reorders the rows of q and k of some architectures, and `rotary_row_order` undoes that.

LAYER_PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.*.gate_proj", "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj", "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "layer_output_scale.weight": "layer_scalar",
    "nextn.eh_proj": "eh_proj", "nextn.enorm": "enorm", "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm", "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}  # fmt: skip
"""Parts of a layer; to both names belongs the same "weight" or "bias", unless they are whole names already."""
TOP_PARTS = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm", "position_embd": "model.embed_positions",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Divisors of the rotary frequencies, which `gguf_rope.py` turns into `rope_scaling`."""
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.([a-z0-9_.]+)", re.ASCII)
_KIND = re.compile(r"\.(weight|bias)$", re.ASCII)


class TensorNames:
    """The names of one architecture's tensors."""

    def __init__(self, others: Mapping[str, str] | None = None) -> None:
        """`others`: what it names differently: parts of a layer, of the whole, and "blk", a layer itself.

        A usual name that another part has there is none.
        """
        others = others or {}
        self._layers = others.get("blk", "model.layers")
        usual = {part: name for part, name in {**LAYER_PARTS, **TOP_PARTS}.items() if name not in others.values()}
        names, top = {**usual, **others}, (*TOP_PARTS, "token_embd_norm")
        self._top = {part: name for part, name in names.items() if part in top}
        # Parts of a shared expert come before those of an MLP that have the same names.
        in_layer = sorted((part for part in names if part not in (*top, "blk")), key=lambda part: "_shexp" not in part)
        self._in_layer = {part: names[part] for part in in_layer}

    def huggingface(self, gguf_name: str) -> str | None:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that is not known.

        "*" in the result stands for the index of an expert: the tensor has a matrix for each.
        """
        if match := _LAYER.fullmatch(gguf_name):
            name = _whole(self._in_layer, match[2])
            return None if name is None else f"{self._layers}.{match[1]}.{name}"
        return _whole(self._top, gguf_name)

    def all(self, num_layers: int) -> Iterator[tuple[str, str]]:
        """Yield the names that tensors may have, GGUF's and Hugging Face's, in the order of files."""
        for table, gguf_prefix, prefix in (
            (self._top, "", ""),
            *((self._in_layer, f"blk.{layer}.", f"{self._layers}.{layer}.") for layer in range(num_layers)),
        ):
            for part, name in table.items():
                for kind in ("", ".weight", ".bias"):
                    yield f"{gguf_prefix}{part}{kind}", f"{prefix}{name}{kind}"


def _whole(table: Mapping[str, str], part: str) -> str | None:
    """Return the name of a part with its "weight" or "bias"."""
    kind = _KIND.search(part)
    if part in table:
        return table[part]
    name = table.get(part[: kind.start()]) if kind else None
    return None if name is None or kind is None else name + kind[0]


def predicts_further(gguf_name: str, num_layers: int) -> bool:
    """True for tensors of the layers behind the last, which predict tokens after the next."""
    match = _LAYER.match(gguf_name)
    return match is not None and int(match[1]) >= num_layers


def is_rotary_projection(gguf_name: str) -> bool:
    """True if the rows of this tensor are the query or key heads that RoPE rotates."""
    match = _LAYER.fullmatch(gguf_name)
    return match is not None and _KIND.sub("", match[2]) in ("attn_q", "attn_k")


@functools.lru_cache(maxsize=8)
def rotary_row_order(num_rows: int, head_size: int) -> np.ndarray:
    """The stored position of each row of q or k, in Hugging Face's order, in such a file.

    Row h D + s D/2 + j (head h, half s, pair j) is stored at h D + 2 j + s. Shapes: int64 `[num_rows]`.
    """
    stored = np.arange(num_rows, dtype=np.int64)
    return stored.reshape(-1, head_size // 2, 2).swapaxes(1, 2).reshape(num_rows)
