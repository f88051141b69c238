"""`adapters_section`: bytes and work of LoRA adapters beside those of the model. Next to read: `explanation.py`."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelFileError
from quire.insight.explain.rank_model import RankModel
from quire.insight.explain.report import Quantity, Section
from quire.lazy_torch import on_meta
from quire.runtime.adapter_layout import AdapterLayout, linear_shapes, num_parameters
from quire.runtime.loader import make_model
from quire.weights.adapter_files import MAX_RANK, read_adapter

BF16_BYTES = 2


def adapters_section(
    given: Sequence[str], hf_config: Mapping[str, Any], rank: RankModel, batches: Sequence[int]
) -> Section:
    """Return a row per adapter, and what steps read if each of their streams has another one.

    `given`: each a rank of a thought one on every linear layer, or NAME=PATH. Raises: ConfigError; ModelFileError,
    UnsupportedModelError for files that do not fit the model.
    """
    section = Section(
        "Adapters",
        header=("adapter", "rank", "layers", "parameters", "bytes in bf16", "FLOPs a token"),
        units=("text", "text", "count", "count", "B", "FLOP"),
    )
    sizes = []
    for item in given:
        name, ranks, num_layers, num_values = _measure(item, hf_config)
        sizes.append(num_values * BF16_BYTES)
        section.rows.append((name, ranks, num_layers, num_values, sizes[-1], 2 * num_values))
    mean = sum(sizes) // len(sizes)
    for streams in dict.fromkeys((1, *batches)):
        name = f"read by {streams} stream{'s' * (streams > 1)} with an adapter each"
        share = f"{streams} · {mean}, {streams * mean / rank.weight_bytes:.1%} of the weights"
        section.quantities.append(Quantity(name, streams * mean, "B", "streams · mean of the adapters' bytes", share))
    section.notes.append("streams with the same adapter read it once; --lora-bytes of memory stay free for adapters")
    return section


def _measure(item: str, hf_config: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Return name, rank, number of layers and of values."""
    if item.isdecimal():
        if not 1 <= int(item) <= MAX_RANK:
            raise ConfigError(f"--lora {item}: ranks from 1 to {MAX_RANK} are computed")
        shapes = linear_shapes(hf_config)
        return "any", item, len(shapes), num_parameters(shapes, int(item))
    name, _, path = item.partition("=")
    if not name or not path:
        raise ConfigError(f"--lora {item} is neither NAME=PATH nor a rank")
    if not Path(path).exists():
        raise ModelFileError(f"{path}: there is no such adapter; give PEFT's directory or a GGUF file")
    files = read_adapter(Path(path), hf_config)
    with on_meta():
        AdapterLayout(make_model(hf_config)).place(files)
    pairs = files.pairs.values()
    ranks = sorted({pair.rank for pair in pairs})
    return name, ", ".join(map(str, ranks)), len(pairs), sum(prod(pair.a.shape) + prod(pair.b.shape) for pair in pairs)
