"""`quire cache ls`, `verify` and `clear`: directories of `--kv-disk` and of `--weight-cache`.

Next to read: `../runtime/block_files.py`, `../runtime/shared_file.py`.
"""

import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from quire.byte_sizes import format_bytes
from quire.cli.command import option, output_of, verb
from quire.cli.options import environment_name
from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.runtime import shared_file
from quire.runtime.block_files import BlockFile, files_in, list_models, read_description
from quire.runtime.cached_files import CachedFile
from quire.runtime.shared_file import FoundFile
from quire.weights.model_cache import weight_directory

_directory: Callable[[Callable[..., Any]], Callable[..., Any]] = click.argument(
    "directory", required=False, envvar=environment_name("kv_disk"), type=click.Path(path_type=Path)
)
HEADER = ("model", "kv type", "block", "blocks", "size", "made by", "key")
WEIGHTS_HEADER = ("weights of", "rank", "size", "used", "made by", "source")


@verb("cache ls", ("quire cache ls", "quire cache ls ~/kv", "quire cache ls ~/kv --json"))
@_directory
def cache_ls_command(directory: Path | None) -> None:
    """List the packed weights, or the KV blocks in a directory of --kv-disk, by model."""
    output, directory = output_of(), directory or _weight_directory()
    blocks, files = _read(directory)
    models, weights = [_describe(folder, found) for folder, found in blocks.items()], list(map(describe_weights, files))
    if output.json:
        value = {"directory": str(directory), "models": models, "weights": weights}
        output.result_json("quire.cache.ls/1", value)
        return
    if weights:
        rows = [
            [
                item["model"],
                str(item["rank"]),
                format_bytes(item["num_bytes"]),
                _ago(item["used_s"]),
                item["made_by"],
                item["source"],
            ]
            for item in weights
        ]
        output.table(WEIGHTS_HEADER, rows, right=frozenset({1, 2}))
    if models:
        rows = [
            [
                item["model"],
                item["kv_cache_dtype"],
                str(item["block_size"]),
                str(item["num_blocks"]),
                format_bytes(item["num_bytes"]),
                item["made_by"],
                item["key"],
            ]
            for item in models
        ]
        output.table(HEADER, rows, right=frozenset({2, 3, 4}))
    if not models and not weights:
        output.note(f"no packed weights and no KV blocks in {directory}")


@verb("cache verify", ("quire cache verify", "quire cache verify ~/kv"))
@_directory
def cache_verify_command(directory: Path | None) -> None:
    """Read all packed weights, or all KV blocks of a directory, and name the damaged files.

    No engine uses a damaged block. Weights are read here alone: delete a damaged file, and the next start packs anew.
    """
    output, directory = output_of(), directory or _weight_directory()
    damaged = []
    blocks, weights = _read(directory)
    files = list(itertools.chain(*blocks.values()))
    every: list[CachedFile] = [*files, *weights]
    for file in every:
        with contextlib.suppress(FileNotFoundError):  # engines that run delete files
            try:
                problem = file.problem()
            except OSError as error:
                problem = f"cannot be read: {error.strerror or error}"
            if problem is not None:
                damaged.append({"path": str(file.path), "problem": problem})
    if output.json:
        counts = {"num_blocks": len(files), "num_weight_files": len(weights)}
        value = {"directory": str(directory), **counts, "damaged": damaged}
        output.result_json("quire.cache.verify/1", value)
        return
    for item in damaged:
        output.result(f"{item['path']} {item['problem']}")
    output.note(f"{_count(files, weights)}, {len(damaged)} damaged")


@verb("cache clear", ("quire cache clear", "quire cache clear ~/kv --yes"))
@_directory
@option("-y", "--yes", is_flag=True, help="do not ask")
def cache_clear_command(directory: Path | None, yes: bool) -> None:
    """Delete all packed weights, or the KV blocks in a directory; engines that run go on."""
    output, directory = output_of(), directory or _weight_directory()
    blocks, weights = _read(directory)
    files = list(itertools.chain(*blocks.values()))
    every: list[CachedFile] = [*files, *weights]
    num_bytes, count = sum(file.num_bytes for file in every), _count(files, weights)
    question = f"Delete {count} ({format_bytes(num_bytes)}) in {directory}?"
    if every and not yes and not output.confirm(f"deleting {count}", question):
        return
    for file in every:
        file.path.unlink(missing_ok=True)
    if output.json:
        value = {"num_blocks": len(files), "num_weight_files": len(weights), "num_bytes": num_bytes}
        output.result_json("quire.cache.clear/1", value)
    else:
        output.note(f"{count} deleted, {format_bytes(num_bytes)} freed")


def describe_weights(file: FoundFile) -> dict[str, Any]:
    """Return what is known of a file of packed weights."""
    header = file.header
    return {
        "model": "unknown" if header is None else header.model,
        "source": "" if header is None else header.source,
        "rank": 0 if header is None else header.rank,
        "num_bytes": file.num_bytes,
        "used_s": file.used_ns / 1e9,
        "made_by": "unknown" if header is None else header.made_by,
        "path": str(file.path),
    }


def _count(blocks: list[BlockFile], weights: list[FoundFile]) -> str:
    found = [f"{len(blocks)} KV blocks"] if blocks or not weights else []
    return " and ".join([*found, f"{len(weights)} files of packed weights"] if weights else found)


def _ago(time_s: float) -> str:
    days = (time.time() - time_s) / 86400
    return "today" if days < 1 else f"{days:.0f} days ago"


def _weight_directory() -> Path:
    """Return the directory of packed weights. Raises: ConfigError where they are not kept."""
    directory = weight_directory(EngineOptions())
    if directory is None:
        raise ConfigError(
            "packed weights are not kept (QUIRE_WEIGHT_CACHE=off): name a directory, or unset the variable"
        )
    return directory


def _read(directory: Path) -> tuple[dict[Path, list[BlockFile]], list[FoundFile]]:
    """Return the KV blocks of each model, and the files of packed weights.

    Raises: ConfigError if the directory cannot be listed.
    """
    root = directory.expanduser()
    if not root.exists() and root == weight_directory(EngineOptions()):
        return {}, []
    try:
        return {folder: list(files_in(folder)) for folder in list_models(root)}, list(shared_file.list_files(root))
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be listed ({error.strerror or error}): name the directory of --kv-disk, or of "
            "--weight-cache"
        ) from error


def _describe(folder: Path, files: list[BlockFile]) -> dict[str, Any]:
    known = read_description(folder)
    described = {name: str(known.get(name, "unknown")) for name in ("model", "dtype", "kv_cache_dtype", "made_by")}
    return {
        **described,
        "block_size": known.get("block_size", 0),
        "key": folder.name,
        "num_blocks": len(files),
        "num_bytes": sum(file.num_bytes for file in files),
    }
