"""Layers with recurrent state in GGUF files: rows of their keys, and their values as Hugging Face has them.

llama.cpp stores -exp(A_log) instead of A_log, flat vectors as columns, and for Qwen3.5 the value heads of all key heads
in turns: the first of each, then the second of each. Next to read: `gguf_config.py`; `models/hf_state_space.py` and
`models/qwen3_next.py` for the layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.errors import ModelFileError
from quire.weights.gguf_codecs import COUNT, FULL, WRITTEN, Codec
from quire.weights.gguf_fields import KV_HEADS, ROTATED_SHARE, Field
from quire.weights.gguf_file import Metadata
from quire.weights.weight_tensor import BLOCK_FORMATS, NVFP4, WeightTensor, quantize

FLAT = (".A_log", ".D", "mixer.norm.weight", "mamba.norm.weight")
"""Ends of Hugging Face's names of vectors, which files may store with two dimensions."""
ROW_PER_HEAD = ("in_proj_a", "in_proj_b", "A_log", "dt_bias")
"""Tensors of delta nets with a row, or an element, for each value head."""
KEYS = ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
"""Ends of the keys `ssm.*`, in the order of `StateSizes`."""
WIDE_BLOCK_LEN = 32
"""Weights that share a scale in Q8_0."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The keys `ssm.*`. Of delta nets `num_groups` are the key heads of `state_size`, `num_heads` the value heads."""

    num_taps: int
    inner_size: int
    state_size: int
    num_heads: int
    num_groups: int

    @classmethod
    def read(cls, metadata: Metadata) -> "StateSizes":
        """Raises: ModelFileError for sizes that are missing or do not divide."""
        sizes = cls(*(metadata.integer(f"ssm.{name}") for name in KEYS))
        if sizes.inner_size % sizes.num_heads or sizes.num_heads % sizes.num_groups:
            raise ModelFileError(
                f"{metadata.path}: {metadata.key('ssm.inner_size')} {sizes.inner_size}, ssm.time_step_rank "
                f"{sizes.num_heads} and ssm.group_count {sizes.num_groups} do not divide one another"
            )
        return sizes

    @classmethod
    def of(cls, keys: Mapping[str, int]) -> "StateSizes | None":
        """Return the sizes in keys without the architecture's name, None for a model without such layers."""
        return cls(*(keys[f"ssm.{name}"] for name in KEYS)) if "ssm.inner_size" in keys else None

    @property
    def head_size(self) -> int:
        """Channels of a head, of delta nets of a value head."""
        return self.inner_size // self.num_heads


HEAD_SIZE = Codec(lambda metadata, key, default: StateSizes.read(metadata).head_size)
"""Channels of a head; stored are those of all heads."""
MIXED_KV_HEADS = replace(KV_HEADS, default=None)


def layers_with(kind: str) -> tuple[Field, Field]:
    """KV heads by layer, 0 in layers of the type `kind`, which have state."""
    codec = Codec(lambda metadata, key, default: [FULL if count else kind for count in metadata.counts(key)])
    return MIXED_KV_HEADS, Field(
        KV_HEADS.key,
        "layer_types",
        codec,
        attribute=lambda read: [0 if read.is_recurrent(at) else read.num_kv_heads for at in range(read.num_layers)],
    )


def _states(names: Sequence[str], attributes: Sequence[str], inner_size: Callable[[Any], int]) -> tuple[Field, ...]:
    """Layers with state: config.json's names of taps, state size, heads, groups and head size, and the `Config`'s."""
    keys = ("conv_kernel", "state_size", "time_step_rank", "group_count")
    sizes = zip(keys, names[:4], attributes, strict=True)
    rows = (Field(f"ssm.{key}", name, attribute=attribute) for key, name, attribute in sizes)
    return (*rows, Field("ssm.inner_size", names[4], HEAD_SIZE, attribute=inner_size))


def state_space(*names: str) -> tuple[Field, ...]:
    """Rows of Mamba 2's layers, see `_states`."""
    attributes = [f"state_space.{name}" for name in ("num_taps", "state_size", "num_heads", "num_groups")]
    return _states(names, attributes, lambda read: read.state_space.num_heads * read.state_space.head_size)


def expansion(heads: str, head_size: str) -> Callable[[Mapping[str, Any]], int]:
    """Return how many times the model's width all heads have, by config.json's names of their sizes."""
    return lambda config: config[heads] * config[head_size] // config["hidden_size"]


def _third_sections(read: Any) -> list[int]:
    num_pairs = read.rope.rotated_size(read.head_size) // 2
    return [*((num_pairs + more) // 3 for more in (2, 1, 0)), 0]


def _read_recurrent(metadata: Metadata, key: str, default: Any) -> list[str]:
    flags = metadata.pattern(key, default, metadata.integer("block_count"))[: metadata.num_layers]
    return ["linear_attention" if is_recurrent else FULL for is_recurrent in flags]


def _interval(recurrent: Sequence[bool]) -> int:
    """Return n if every n-th layer attends."""
    return 1 + (recurrent.index(False) if False in recurrent else len(recurrent))


def _recurrent_pattern(read: Any) -> list[bool] | None:
    """Return the layers with state, those that predict further tokens included; None if the interval says them."""
    recurrent = read.recurrent_layers
    interval = _interval(recurrent)
    is_regular = all(each == ((index + 1) % interval != 0) for index, each in enumerate(recurrent))
    return None if is_regular else [*recurrent, *[False] * read.num_predictors]


DELTA_NET = (
    *_states(
        (
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_num_value_heads",
            "linear_num_key_heads",
            "linear_value_head_dim",
        ),
        ("num_taps", "key_size", "num_value_heads", "num_key_heads"),
        lambda read: read.num_value_heads * read.value_size,
    ),
    ROTATED_SHARE,
    MIXED_KV_HEADS,
    Field(
        "full_attention_interval", "full_attention_interval", COUNT, 4, lambda read: _interval(read.recurrent_layers)
    ),
    Field(
        "attention.recurrent_layers",
        "layer_types",
        Codec(_read_recurrent),
        "full_attention_interval",
        _recurrent_pattern,
    ),
)
SECTIONS = (
    Field("rope.dimension_sections", "", WRITTEN, attribute=_third_sections),
    Field(
        "rope.dimension_sections",
        "rope_parameters",
        Codec(None, lambda rope: [*rope["mrope_section"], 0] if "mrope_section" in rope else None),
    ),
)
"""Rotated pairs of each axis of images; llama.cpp needs some for text, too."""


def state_space_names(module: str) -> dict[str, str]:
    """The names of Mamba 2's tensors, which are those of delta nets where both have one."""
    names = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_dt.bias": "dt_bias",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
    }
    return {part: f"{module}.{name}" for part, name in names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecodedTensor(WeightTensor):
    """A matrix with equal parts of its columns, no whole blocks, in another order: decoded and encoded when it is read.

    `part_order`: stored position of each part of `source`'s columns.
    """

    source: WeightTensor
    part_order: np.ndarray

    @property
    def raw(self) -> np.ndarray:
        """Shapes: uint8 `[rows, row_bytes]`."""
        parts = self.source.to_numpy().reshape(self.shape[0], len(self.part_order), -1)
        return quantize(parts[:, self.part_order].reshape(self.shape), self.format)

    def part(self, rows: slice, columns: slice) -> WeightTensor:
        """Some rows and columns; the whole is read for some columns."""
        if columns != slice(None):
            return WeightTensor(self.name, self.shape, self.format, self.raw).part(rows, columns)
        source = self.source.part(rows, columns)
        return replace(self, shape=source.shape, stored=source.stored, source=source)


def as_huggingface(tensor: WeightTensor, sizes: StateSizes | None) -> WeightTensor:
    """Return a tensor of a layer with state as Hugging Face stores it.

    `sizes`: of delta nets whose value heads are stored in turns, else None. Raises: ModelFileError.
    """
    if tensor.name.endswith(FLAT):
        tensor = replace(tensor, shape=(math.prod(tensor.shape),), stored=tensor.stored.reshape(1, -1))
    if tensor.name.endswith(".A_log"):
        rates = -tensor.to_numpy()
        if not (rates > 0).all():
            raise ModelFileError(f"tensor '{tensor.name}': a rate of decay is not below 0; fetch the model again")
        logarithms = np.log(rates, dtype=np.float64).astype(np.float32)
        tensor = replace(tensor, format="F32", stored=logarithms.view(np.uint8).reshape(1, -1))
    return tensor if sizes is None else _with_value_heads(tensor, sizes, _turns)


def value_heads_in_turns(tensor: WeightTensor, sizes: StateSizes) -> WeightTensor:
    """Return a tensor of a delta net with the value heads of all key heads in turns: the opposite of the above."""
    return _with_value_heads(tensor, sizes, lambda sizes, size: np.argsort(_turns(sizes, size)))


def _with_value_heads(
    tensor: WeightTensor, sizes: StateSizes, order_of: Callable[[StateSizes, int], np.ndarray]
) -> WeightTensor:
    """Reorder the rows or columns of value heads by `order_of` these sizes and the rows of a head."""
    if sizes.num_heads == sizes.num_groups:
        return tensor
    size, keys = sizes.head_size, 2 * sizes.num_groups * sizes.state_size
    name = tensor.name.removesuffix(".weight").rpartition("linear_attn.")[2]
    if name == "out_proj":
        block_len = {**BLOCK_FORMATS, NVFP4.name: NVFP4}[tensor.format].block_len
        if size % block_len == 0:
            return replace(tensor, column_order=order_of(sizes, size // block_len))
        encoded, order = "BF16" if size % WIDE_BLOCK_LEN else "Q8_0", order_of(sizes, 1)
        return RecodedTensor(tensor.name, tensor.shape, encoded, tensor.stored, source=tensor, part_order=order)
    rows = {"in_proj_qkv": size, "conv1d": size, "in_proj_z": size, **dict.fromkeys(ROW_PER_HEAD, 1)}.get(name)
    if rows is None:
        return tensor
    first = keys if name in ("in_proj_qkv", "conv1d") else 0
    if tensor.shape[0] != first + sizes.num_heads * rows:
        raise ModelFileError(
            f"tensor '{tensor.name}': its {tensor.shape[0]} rows are not those that the keys ssm.* give"
        )
    return tensor.with_rows(np.concatenate([np.arange(first), first + order_of(sizes, rows)]))


def _turns(sizes: StateSizes, size: int) -> np.ndarray:
    """The stored position of each of `size` rows of each value head. Shapes: int64 [H * size].

    Head k R + r, the r-th of R of key head k of K, is stored as r K + k.
    """
    stored = np.arange(sizes.num_heads * size).reshape(-1, sizes.num_groups, size)
    return stored.swapaxes(0, 1).reshape(-1)
