"""`quire pull`, `quire ls`, `quire rm`: the models in the cache. Next to read: `show.py`."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from quire.byte_sizes import format_bytes
from quire.cli.command import option, output_of, verb
from quire.cli.options import environment_name, revision_option
from quire.cli.progress import show_progress
from quire.config import EngineOptions

if TYPE_CHECKING:
    from quire.runtime.shared_file import FoundFile
    from quire.weights.model_cache import CachedModel


@verb("pull", ("quire pull", "quire pull smollm2 --json"))
@click.argument("model", default=EngineOptions.model, envvar=environment_name("model"))
@revision_option
def pull_command(model: str, revision: str | None) -> None:
    """Fetch a model into the cache."""
    from quire.weights.sources import resolve_source

    output = output_of()
    with show_progress(output) as progress:
        files = resolve_source(model, revision=revision, progress=progress)
    if output.json:
        value = {"model": files.name, "origin": files.origin, "kind": files.kind, "path": str(files.path)}
        output.result_json("quire.pull/1", value)
    else:
        output.result(str(files.path))
        output.note(f"{files.name} → {files.origin}   next: quire run {files.name}")


@verb("ls", ("quire ls", "quire ls --json"))
def ls_command() -> None:
    """List cached models."""
    from quire.weights.model_cache import list_cached

    output = output_of()
    cached = list_cached()
    packed = [sum(file.num_bytes for file in files) for files in _packed_weights(cached)]
    if output.json:
        models = [
            {
                "name": item.name,
                "origin": item.origin,
                "path": str(item.path),
                "size_bytes": item.size_bytes,
                "packed_bytes": packed_bytes,
            }
            for item, packed_bytes in zip(cached, packed, strict=True)
        ]
        output.result_json("quire.ls/1", {"models": models})
    elif cached:
        rows = [
            [item.name, format_bytes(item.size_bytes), format_bytes(num_bytes), item.origin, str(item.path)]
            for item, num_bytes in zip(cached, packed, strict=True)
        ]
        output.table(["name", "size", "packed", "origin", "path"], rows, right=frozenset({1, 2}))
    else:
        output.note(f"no models yet   next: quire pull {EngineOptions.model}")


@verb("rm", ("quire rm smollm2", "quire rm smollm2 --yes"))
@click.argument("model")
@option("-y", "--yes", is_flag=True, help="do not ask")
def rm_command(model: str, yes: bool) -> None:
    """Remove a model from the cache, with its packed weights."""
    from quire.weights.model_cache import find_cached, remove_cached

    output = output_of()
    found = find_cached(model)
    (files,) = _packed_weights([found])
    size_bytes = found.size_bytes + sum(file.num_bytes for file in files)
    size = format_bytes(size_bytes)
    if not yes and not output.confirm(f"removing '{model}' ({size})", f"Remove {found.path} ({size})?"):
        output.note(f"kept {found.name}")
        return
    remove_cached(found.name)
    for file in files:
        file.path.unlink(missing_ok=True)
    if output.json:
        output.result_json("quire.rm/1", {"removed": found.name, "size_bytes": size_bytes})
    else:
        output.note(f"removed {found.name}, {size} freed")


def _packed_weights(models: Sequence["CachedModel"]) -> list[list["FoundFile"]]:
    """Return the files of packed weights of each model, of all its versions."""
    from quire.runtime.shared_file import list_files
    from quire.weights.model_cache import weight_directory

    directory = weight_directory(EngineOptions())
    files: list[FoundFile] = []
    with suppress(OSError):  # no weights were packed yet
        files = [] if directory is None else list(list_files(directory))
    sources = [model.path.parent.parent if model.origin.startswith("hub:") else model.path for model in models]
    return [[file for file in files if file.is_of(source)] for source in sources]
