"""`read_sizes`: the sizes that every decoder has, from a `config.json`; windows and types of layers.

Next to read: `hf_llama.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from quire.errors import UnsupportedModelError
from quire.models.hf_config import MAX_LAYERS, HFConfigReader, check_divides

FULL, SLIDING = "full_attention", "sliding_attention"
"""Hugging Face's names of layers without and with a window."""
RECURRENT = ("linear_attention", "mamba", "conv")
"""Names of layers with recurrent state."""


def read_sizes(
    reader: HFConfigReader,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    context: str = "max_position_embeddings",
    head_size: int | None = None,
    ties: bool = False,
) -> dict[str, Any]:
    """Read all sizes but the MLP's, for one KV head per query head and attention to all earlier tokens.

    `hidden`, `layers`, `heads`, `context`: the config's names. `head_size` None: heads share the hidden size.
    `ties`: the default of `tie_word_embeddings`.
    """
    hidden_size, num_heads = reader.integer(hidden), reader.integer(heads)
    num_layers = reader.integer(layers, maximum=MAX_LAYERS)
    if head_size is None:
        check_divides(heads, num_heads, hidden, hidden_size)
        head_size = hidden_size // num_heads
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": head_size,
        "context_len": reader.integer(context),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", ties),
        "windows": (None,) * num_layers,
    }


def read_window(reader: HFConfigReader, default: int | None = None) -> int | None:
    """Read `sliding_window`, null for none. `default`: of a config without the field."""
    return reader.optional_integer("sliding_window") if reader.has("sliding_window") else default


def read_layers(
    reader: HFConfigReader,
    num_layers: int,
    chosen: Sequence[str],
    others: Sequence[str],
    is_chosen: Callable[[int], bool],
    *names: str,
) -> list[bool]:
    """Read of each layer whether `layer_types`, or a field of another of the `names`, has one of the `chosen` types.

    Without such a field `is_chosen` tells, by index. Raises: UnsupportedModelError for types that are not `others`.
    """
    lists = [reader.strings(name, num_layers) for name in ("layer_types", *names)]
    found = next((types for types in lists if types is not None), None)
    if found is None:
        return [is_chosen(index) for index in range(num_layers)]
    for layer_type in found:
        if layer_type not in (*chosen, *others):
            raise UnsupportedModelError(
                f"layer type {layer_type!r} is not supported; supported are {', '.join((*others, *chosen))}"
            )
    return [layer_type in chosen for layer_type in found]


def read_windows(
    reader: HFConfigReader, num_layers: int, window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The window of each layer: `window` in those that `layer_types`, or else `is_sliding`, makes sliding."""
    slides = read_layers(reader, num_layers, (SLIDING,), (FULL,), is_sliding)
    return tuple(window if slide else None for slide in slides)


def read_recurrent_layers(
    reader: HFConfigReader, num_layers: int, is_recurrent: Callable[[int], bool], *names: str
) -> tuple[bool, ...]:
    """Read which layers have recurrent state instead of attention. `names`: see `read_layers`."""
    return tuple(read_layers(reader, num_layers, RECURRENT, (FULL, "attention"), is_recurrent, *names))
