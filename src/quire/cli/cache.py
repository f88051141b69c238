"""`quire cache ls`, `verify` and `clear`: directories of `--kv-disk`. Next to read: `../runtime/block_files.py`."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from quire.byte_sizes import format_bytes
from quire.cli.command import option, output_of, verb
from quire.cli.options import environment_name
from quire.errors import ConfigError
from quire.runtime.block_files import BlockFile, check, files_in, list_models, read_description

_directory: Callable[[Callable[..., Any]], Callable[..., Any]] = click.argument(
    "directory", envvar=environment_name("kv_disk"), type=click.Path(path_type=Path)
)
HEADER = ("model", "kv type", "block", "blocks", "size", "made by", "key")


@verb("cache ls", ("quire cache ls ~/kv", "quire cache ls ~/kv --json"))
@_directory
def cache_ls_command(directory: Path) -> None:
    """List the KV blocks in a directory of --kv-disk, by model."""
    output = output_of()
    models = [_describe(folder, files) for folder, files in _read(directory).items()]
    if output.json:
        output.result_json("quire.cache.ls/1", {"directory": str(directory), "models": models})
    elif models:
        rows = [
            [item["model"], item["kv_cache_dtype"], str(item["block_size"]), str(item["num_blocks"]),
             format_bytes(item["num_bytes"]), item["made_by"], item["key"]]
            for item in models
        ]  # fmt: skip
        output.table(HEADER, rows, right=frozenset({2, 3, 4}))
    else:
        output.note(f"no KV blocks in {directory}")


@verb("cache verify", ("quire cache verify ~/kv",))
@_directory
def cache_verify_command(directory: Path) -> None:
    """Read all KV blocks of a directory and name the damaged ones, which no engine uses."""
    output = output_of()
    damaged = []
    files = [file for found in _read(directory).values() for file in found]
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # engines that run delete files
            try:
                problem = check(file)
            except OSError as error:
                problem = f"cannot be read: {error.strerror or error}"
            if problem is not None:
                damaged.append({"path": str(file.path), "problem": problem})
    if output.json:
        value = {"directory": str(directory), "num_blocks": len(files), "damaged": damaged}
        output.result_json("quire.cache.verify/1", value)
        return
    for item in damaged:
        output.result(f"{item['path']} {item['problem']}")
    output.note(f"{len(files)} blocks, {len(damaged)} damaged")


@verb("cache clear", ("quire cache clear ~/kv --yes",))
@_directory
@option("-y", "--yes", is_flag=True, help="do not ask")
def cache_clear_command(directory: Path, yes: bool) -> None:
    """Delete the KV blocks of all models in a directory; engines that run go on."""
    output = output_of()
    files = [file for found in _read(directory).values() for file in found]
    num_bytes = sum(file.num_bytes for file in files)
    question = f"Delete {len(files)} KV blocks ({format_bytes(num_bytes)}) in {directory}?"
    if files and not yes and not output.confirm(f"deleting {len(files)} KV blocks", question):
        return
    for file in files:
        file.path.unlink(missing_ok=True)
    if output.json:
        output.result_json("quire.cache.clear/1", {"num_blocks": len(files), "num_bytes": num_bytes})
    else:
        output.note(f"{len(files)} KV blocks deleted, {format_bytes(num_bytes)} freed")


def _read(directory: Path) -> dict[Path, list[BlockFile]]:
    """Return the files of each model. Raises: ConfigError if the directory cannot be listed."""
    try:
        return {folder: list(files_in(folder)) for folder in list_models(directory.expanduser())}
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be listed ({error.strerror or error}): name the directory of --kv-disk"
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
