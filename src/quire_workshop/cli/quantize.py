"""`quire quantize`: write a model as a quantised GGUF file. Next to read: `../gguf/quantize.py`."""

import struct
import time
from collections import Counter
from dataclasses import astuple, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.byte_sizes import format_bytes
from quire.cli.command import option, output_of, verb
from quire.cli.options import revision_option
from quire.cli.terminal import show_progress
from quire.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from quire.cli.terminal import Output
    from quire.weights.sources import ModelFiles
    from quire_workshop.gguf.quantize import Importance, ModelToQuantize

EXAMPLES = (
    "quire quantize org/model model-q4_k_m.gguf --type Q4_K_M",
    "quire quantize ./model.gguf small.gguf --type Q4_K_S --imatrix-text wiki.txt",
)


ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""llama.cpp's shorter names."""


@verb("quantize", EXAMPLES)
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@option(
    "--type",
    "file_type",
    required=True,
    metavar="TYPE",
    help="Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, Q4_1, Q4_0, Q3_K_L, Q3_K_M, Q3_K_S, Q2_K, "
    "BF16, F16 or F32",
)
@option(
    "--imatrix-text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="text on which to measure how much each weight matters",
)
@option(
    "--imatrix",
    "imatrix_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="importance matrix of llama.cpp (.gguf or .dat); with --imatrix-text the file to write",
)
@revision_option
def quantize_command(
    model: str, out: Path, file_type: str, imatrix_text: Path | None, imatrix_path: Path | None, revision: str | None
) -> None:
    """Write a model as a quantised GGUF file.

    MODEL is a Hugging Face directory or a GGUF file, by path or name. OUT opens in Quire and in llama.cpp. The types
    are llama.cpp's, and so are the formats of each tensor; rows that are no multiple of 256 weights take Q4_0, Q5_0,
    Q5_1 or Q8_0 in place of a K format.
    """
    from quire.weights.sources import resolve_source
    from quire_workshop.gguf.quantize import FILE_TYPES, quantize_gguf

    output = output_of()
    file_type = ALIASES.get(file_type.upper(), file_type.upper())
    if file_type not in FILE_TYPES:
        raise click.BadParameter(f"'{file_type}' is none of {', '.join(FILE_TYPES)}", param_hint="--type")
    if out.exists():
        raise ConfigError(f"{out} exists; remove it, or choose another name")
    with show_progress(output) as progress:
        files = resolve_source(model, revision=revision, progress=progress)
    source = open_source(files)
    importance = _importance(files, source, imatrix_text, imatrix_path, output)
    start = time.monotonic()
    with show_progress(output) as progress:
        formats = quantize_gguf(source, out, file_type, importance, progress=progress)
    seconds = time.monotonic() - start
    counts = Counter(formats.values())
    num_bytes = out.stat().st_size
    if output.json:
        value = {"path": str(out), "type": file_type, "num_bytes": num_bytes, "tensor_formats": formats}
        output.result_json("quire.quantize/1", {**value, "seconds": seconds})
        return
    output.result(str(out))
    held = ", ".join(f"{name} {count} tensors" for name, count in counts.most_common())
    output.note(f"{format_bytes(num_bytes)} in {seconds:.1f} s: {held}   next: quire run {out}")


def open_source(files: "ModelFiles") -> "ModelToQuantize":
    """Open a GGUF file of any architecture, or a directory of one that GGUF can say completely.

    Raises: ModelFileError; UnsupportedModelError for a directory whose config or tokenizer would not come back the
    same from the file.
    """
    from quire.lazy_torch import on_meta
    from quire.models.hf_config import language_model
    from quire.models.registry import ModelRegistry
    from quire.runtime.loader import make_stored
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.gguf_config import sampling_keys
    from quire.weights.gguf_file import read_gguf
    from quire_workshop.gguf.export import completed, describe_config, from_gguf, from_tensors, name_tensors, read_back
    from quire_workshop.gguf.tokenizer_export import describe_tokenizer

    if files.kind == "gguf":
        return from_gguf(read_gguf(files.path), files.recommended_sampling)
    checkpoint = open_checkpoint(files)
    whole = ModelRegistry.resolve(checkpoint.hf_config)
    hf_config, stored = language_model(checkpoint.hf_config, whole, checkpoint.tensors)
    with on_meta():
        model = make_stored(hf_config, stored)
    expected = model.config
    config = completed(hf_config, expected)
    keys, factors = describe_config(config, expected)
    ends = checkpoint.generation_config.get("eos_token_id", hf_config.get("eos_token_id"))
    ids = ends if isinstance(ends, list) else [ends]
    end_ids = [end for end in ids if isinstance(end, int) and 0 <= end < config["vocab_size"]]
    has_merges = keys["general.architecture"] == "gemma4"
    keys |= describe_tokenizer(files.path, config["vocab_size"], end_ids, has_merges=has_merges)
    keys["general.name"] = files.path.name
    keys |= sampling_keys(checkpoint.generation_config)
    named = name_tensors(config, expected, stored, model.layout())
    source = from_tensors(keys, named, factors)
    found = read_back(source, keys)
    other = ModelRegistry.resolve(found)
    read = other.Config.from_hf(found)
    differing = [
        name for name, value in vars(read).items() if _as_stored(value) != _as_stored(vars(expected).get(name))
    ]
    if not isinstance(model, other) or differing:
        what = ", ".join(differing) or "the class"
        raise UnsupportedModelError(
            f"{files.path}: GGUF does not say {what} of this model as written here; convert it with llama.cpp's "
            "convert_hf_to_gguf.py, then quantise the result"
        )
    return source


def _as_stored(value: Any) -> Any:
    """Return a value of a config with its numbers in float32, as GGUF has them."""
    if is_dataclass(value) and not isinstance(value, type):
        value = astuple(value)
    if isinstance(value, tuple | list):
        return tuple(map(_as_stored, value))
    return struct.pack("f", value) if isinstance(value, float) else value


def _importance(
    files: "ModelFiles", source: "ModelToQuantize", text: Path | None, path: Path | None, output: "Output"
) -> "Importance | None":
    from quire_workshop.gguf.quantize import read_importance, write_importance

    if text is None:
        return None if path is None else read_importance(path)
    from quire_workshop.importance import measure_importance

    if path is not None and path.exists():
        raise ConfigError(f"{path} exists: give --imatrix alone to read it, or another name to write")
    try:
        content = text.read_text(errors="replace")
    except OSError as error:
        raise ConfigError(f"--imatrix-text {text}: {error.strerror}") from error
    with show_progress(output) as progress:
        importance, num_tokens, window_len = measure_importance(files, source.tensors, content, progress=progress)
    if path is not None:
        write_importance(path, importance, text.name, num_tokens=num_tokens, window_len=window_len)
    return importance
