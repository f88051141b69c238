"""`quantize_gguf`: a model's weights in fewer bits, as a GGUF file that llama.cpp and Quire open.

Which tensor gets which format follows llama.cpp's quantiser (`llama_tensor_get_type` of its llama-quant.cpp), so that
a file named Q4_K_M has what people expect. The blocks are ours: `native/weights/quantize.h`. Must not know engines.
Errors are weighted by importance matrices: the mean squared activation of each input column, which `../importance.py`
measures. Next to read: `writer.py`, `export.py`.
"""

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.errors import ConfigError, ModelFileError, UnsupportedModelError, printable
from quire.linux import allowed_cpus
from quire.weights.gguf_file import read_gguf
from quire.weights.model_files import Progress, ignore_progress, map_file
from quire.weights.weight_tensor import BLOCK_FORMATS, FLOATS, quantize
from quire_workshop.gguf.writer import TensorToWrite, key_value, write_gguf

FILE_TYPES = {
    "F32": (0, "F32"), "F16": (1, "F16"), "BF16": (32, "BF16"), "Q8_0": (7, "Q8_0"), "Q6_K": (18, "Q6_K"),
    "Q5_K_M": (17, "Q5_K"), "Q5_K_S": (16, "Q5_K"), "Q5_1": (9, "Q5_1"), "Q5_0": (8, "Q5_0"),
    "Q4_K_M": (15, "Q4_K"), "Q4_K_S": (14, "Q4_K"), "Q4_1": (3, "Q4_1"), "Q4_0": (2, "Q4_0"),
    "Q3_K_L": (13, "Q3_K"), "Q3_K_M": (12, "Q3_K"), "Q3_K_S": (11, "Q3_K"), "Q2_K": (10, "Q2_K"),
}  # fmt: skip
"""By name: the number of `general.file_type`, and the format of most matrices."""
FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Formats of 32 for matrices whose rows are no multiple of 256 weights."""
KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|altup|laurel|per_layer_model_proj|position_embd|token_types|ssm_conv1d"
    r"|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight|attn_rel_b\.weight|rel_pos|patch_embd|time_mix_"
)
"""Matrices that are copied: they are small, or sensitive."""
QUANTIZATION_VERSION = 2
WEIGHTS_PER_PIECE = 1 << 24
_LAYER = re.compile(r"blk\.(\d+)\.")
_VALUES = re.compile(r"attn_(v|qkv|kv_b)\.weight")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A stored tensor by its GGUF name; `read(first, last)` gives fp32 rows, `copy` the stored bytes.

    `hf_name`: of the same weight in a Hugging Face directory, where it is known and one matrix.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    read: Callable[[int, int], np.ndarray]
    copy: Callable[[], np.ndarray]
    hf_name: str | None = None


@dataclass(frozen=True, slots=True)
class ModelToQuantize:
    """A model to quantise: keys as `writer.key_value` makes them, and tensors."""

    keys: Mapping[str, bytes]
    tensors: tuple[SourceTensor, ...]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    alignment: int = 32


# --- Formats of tensors -----------------------------------------------------------------------


def uses_more_bits(index: int, count: int) -> bool:
    """True for the layers to which the M mixes give more bits: the first and last eighth, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def choose_formats(source: ModelToQuantize, file_type: str, *, has_importance: bool = False) -> dict[str, str]:
    """The format of each tensor. Raises: ConfigError for an unknown file type."""
    if file_type not in FILE_TYPES:
        raise ConfigError(f"--type {file_type} is unknown; there are {', '.join(FILE_TYPES)}")
    usual = FILE_TYPES[file_type][1]
    is_tied = all(tensor.name != "output.weight" for tensor in source.tensors)
    values = sorted((tensor.name for tensor in source.tensors if _VALUES.search(tensor.name)), key=_layer)
    formats = {}
    for tensor in source.tensors:
        name = tensor.name
        if len(tensor.shape) < 2 or not name.endswith("weight") or KEPT.search(name):
            formats[name] = tensor.format
        elif usual in FLOATS:
            formats[name] = usual
        elif tensor.format == "MXFP4":  # nothing here is smaller, and to quantise it again adds errors
            formats[name] = tensor.format
        elif name == "output.weight" or (is_tied and name == "token_embd.weight"):
            is_whole = tensor.shape[-1] % BLOCK_FORMATS[usual].block_len == 0
            formats[name] = fitting("Q6_K" if is_whole and usual != "Q8_0" else "Q8_0", tensor.shape[-1])
        else:
            index = values.index(name) if name in values else _layer(name)
            chosen = _mixed(source, file_type, name, index, len(values), has_importance=has_importance)
            formats[name] = fitting(chosen or usual, tensor.shape[-1])
    return formats


def fitting(format_name: str, num_columns: int) -> str:
    """Return the format, or its fallback for rows that are not whole blocks."""
    if num_columns % BLOCK_FORMATS[format_name].block_len and format_name in FALLBACKS:
        format_name = FALLBACKS[format_name]
    return "F16" if num_columns % BLOCK_FORMATS[format_name].block_len else format_name


def _layer(name: str) -> int:
    match = _LAYER.match(name)
    return int(match[1]) if match else -1


def _mixed(
    source: ModelToQuantize, file_type: str, name: str, index: int, num_values: int, *, has_importance: bool
) -> str | None:
    """The format that the mix gives this tensor; None for the usual one. `index`: its place among those of its kind."""
    num_layers, first_eighth = source.num_layers, index < source.num_layers // 8
    if _VALUES.search(name):
        shares = source.num_heads // source.num_kv_heads
        chosen = {
            "Q2_K": "Q4_K" if shares >= 4 else "Q3_K",
            "Q3_K_M": "Q5_K" if index < 2 else "Q4_K",
            "Q3_K_L": "Q5_K",
            "Q4_K_S": "Q5_K" if index < 4 else None,
            "Q4_K_M": "Q6_K" if uses_more_bits(index, num_values) else None,
            "Q5_K_M": "Q6_K" if uses_more_bits(index, num_values) else None,
        }.get(file_type)
        if num_layers == 80 and shares > 1 and (chosen or FILE_TYPES[file_type][1]) in ("Q3_K", "Q4_K"):
            chosen = "Q5_K"
        return "Q8_0" if source.num_experts == 8 else chosen
    if "attn_k.weight" in name:
        return "Q8_0" if source.num_experts == 8 else None
    if "ffn_down" in name:
        return {
            "Q2_K": "Q3_K",
            "Q3_K_M": "Q5_K" if index < num_layers // 16 else "Q4_K",
            "Q3_K_L": "Q5_K",
            "Q4_K_S": "Q5_K" if first_eighth else None,
            "Q4_K_M": "Q6_K" if uses_more_bits(index, num_layers) else None,
            "Q5_K_M": "Q6_K" if uses_more_bits(index, num_layers) else None,
            "Q4_0": "Q4_1" if has_importance and first_eighth else None,
            "Q5_0": "Q5_1" if has_importance and first_eighth else None,
        }.get(file_type)
    if "attn_output.weight" in name:
        if source.num_experts == 8:
            return "Q5_K" if file_type in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M") else None
        return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(file_type)
    return None


# --- Values -----------------------------------------------------------------------------------


def quantize_gguf(
    source: ModelToQuantize,
    path: Path,
    file_type: str,
    importance: Mapping[str, np.ndarray] | None = None,
    *,
    progress: Progress = ignore_progress,
) -> dict[str, str]:
    """Write the model in `file_type` and return the format of each tensor.

    `importance`: by tensor name, fp32 `[columns]` or those of each matrix of a stack; tensors that it
    lacks are quantised without.
    Raises: ConfigError, ModelFileError, UnsupportedModelError.
    """
    formats = choose_formats(source, file_type, has_importance=importance is not None)
    total = 4 * sum(math.prod(tensor.shape) for tensor in source.tensors)
    done = 0

    def pieces(tensor: SourceTensor) -> Iterator[np.ndarray]:
        nonlocal done
        if formats[tensor.name] == tensor.format:
            yield tensor.copy()
            done += 4 * math.prod(tensor.shape)
            return
        columns = tensor.shape[-1]
        weights = (importance or {}).get(tensor.name)
        if weights is not None and weights.size not in (columns, columns * math.prod(tensor.shape[:-2])):
            raise UnsupportedModelError(
                f"the importance matrix has {weights.size:,} columns for '{tensor.name}', which has {columns:,}: it is "
                "of another model"
            )
        for first, last, matrix in _parts(tensor.shape):
            given = None if weights is None else weights.reshape(-1, columns)[matrix % (weights.size // columns)]
            try:
                yield quantize(tensor.read(first, last), formats[tensor.name], given, num_threads=len(allowed_cpus()))
            except ModelFileError as error:
                raise ModelFileError(f"tensor '{tensor.name}': {error}") from error
            done += (last - first) * columns * 4
            progress("quantizing", done, total)

    keys = {key: value for key, value in source.keys.items() if not key.startswith("split.")}
    keys["general.file_type"] = key_value("general.file_type", FILE_TYPES[file_type][0])
    keys["general.quantization_version"] = key_value("general.quantization_version", QUANTIZATION_VERSION)
    tensors = [
        TensorToWrite(tensor.name, tensor.shape, BLOCK_FORMATS[formats[tensor.name]], pieces(tensor))
        for tensor in source.tensors
    ]
    write_gguf(path, keys, tensors, alignment=source.alignment)
    return formats


def _parts(shape: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """First and last row of each piece, and the matrix of a stack that it belongs to."""
    rows, columns = shape[-2], shape[-1]
    each = max(1, WEIGHTS_PER_PIECE // columns)
    for matrix in range(math.prod(shape[:-2])):
        for first in range(0, rows, each):
            yield matrix * rows + first, matrix * rows + min(first + each, rows), matrix


# --- Importance matrices, in llama.cpp's files: GGUF and the older .dat, written as GGUF ----------

Importance = Mapping[str, np.ndarray]
"""By tensor name of a GGUF file: fp32, the columns of one matrix after the other."""
SUMS, COUNTS = ".in_sum2", ".counts"
_I32 = struct.Struct("<i")


def read_importance(path: Path) -> dict[str, np.ndarray]:
    """Read an importance matrix. Raises: ModelFileError for a file of another kind, or a damaged one."""
    with map_file(path) as mapping:
        is_gguf = mapping[:4] == b"GGUF"
        found = {} if is_gguf else _read_legacy(path, bytes(mapping))
    if is_gguf:
        file = read_gguf(path)
        for name, stored in file.tensors.items():
            if name.endswith(SUMS) and (counts := file.tensors.get(name.removesuffix(SUMS) + COUNTS)):
                if stored.format.name != "F32" or counts.format.name != "F32":
                    raise ModelFileError(f"{path}: '{printable(name)}' is not F32: no importance matrix")
                sums = file.rows(stored).view("<f4")
                times = file.rows(counts).view("<f4").reshape(-1, 1)
                if len(times) != len(sums):
                    raise ModelFileError(f"{path}: '{printable(name)}' has {len(sums)} rows, {len(times)} counts")
                # Experts that no token chose are as important as any other.
                means = np.where(times > 0, sums / np.maximum(times, 1), 1)
                found[name.removesuffix(SUMS)] = means.astype(np.float32).reshape(-1)
    bad = next((name for name, values in found.items() if not np.all(np.isfinite(values) & (values >= 0))), None)
    if bad is not None or not found:
        problem = (
            f"'{printable(bad)}' has values below 0 or not finite" if bad else "there are no sums of squares in it"
        )
        raise ModelFileError(f"{path}: no importance matrix: {problem}")
    return found


def _read_legacy(path: Path, content: bytes) -> dict[str, np.ndarray]:
    """Per entry: length of the name, name, number of calls, number of values, fp32 sums."""
    found = {}
    try:
        (count,), position = _I32.unpack_from(content), 4
        for _ in range(count):
            (length,) = _I32.unpack_from(content, position)
            name = content[position + 4 : position + 4 + length].decode()
            calls, num_values = struct.unpack_from("<ii", content, position + 4 + length)
            position += 12 + length
            values = np.frombuffer(content, "<f4", num_values, position)
            found[name] = values / np.float32(max(calls, 1))
            position += 4 * num_values
    except (struct.error, ValueError) as error:
        raise ModelFileError(f"{path}: no importance matrix of llama.cpp: {printable(str(error))}") from error
    return found


def write_importance(path: Path, importance: Importance, dataset: str, *, num_tokens: int, window_len: int) -> None:
    """Write the file that llama.cpp's tools read. Raises: ModelFileError when it cannot be written."""
    keys = {
        "general.type": "imatrix",
        "imatrix.datasets": [dataset],
        "imatrix.chunk_count": num_tokens // window_len,
        "imatrix.chunk_size": window_len,
    }
    counts = np.full((1, 1), num_tokens, np.float32)
    tensors = []
    for name, means in importance.items():
        for suffix, values in ((SUMS, means.reshape(1, -1) * counts), (COUNTS, counts)):
            tensors.append(TensorToWrite(name + suffix, values.shape, BLOCK_FORMATS["F32"], [values.view(np.uint8)]))
    write_gguf(path, {key: key_value(key, value) for key, value in keys.items()}, tensors)
