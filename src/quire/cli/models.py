"""`quire pull`, `quire ls`, `quire rm`: the models in the cache. Next to read: `show.py`."""

import sys

import click

from quire.byte_sizes import format_bytes
from quire.cli.command import GroupedOption, VerbCommand, output_of
from quire.cli.options import environment_name
from quire.cli.progress import show_progress
from quire.config import EngineOptions


@click.command(
    "pull", cls=VerbCommand, help="Fetch a model into the cache.",
    examples=("quire pull", "quire pull smollm2 --json"),
)  # fmt: skip
@click.argument("model", default=EngineOptions.model, envvar=environment_name("model"))
@click.option("--revision", envvar=environment_name("revision"), cls=GroupedOption, metavar="TEXT", help="hub revision")
def pull_command(model: str, revision: str | None) -> None:
    """Resolve a model, download its missing files, and print its path."""
    from quire.weights.sources import resolve_source

    output = output_of()
    with show_progress(output) as progress:
        files = resolve_source(model, revision=revision, progress=progress)
    if output.json:
        value = {"model": files.name, "origin": files.origin, "kind": files.kind, "path": str(files.path)}
        output.result_json("quire.pull/1", value)
        return
    output.result(str(files.path))
    output.note(f"{files.name} → {files.origin}   next: quire run {files.name}")


@click.command("ls", cls=VerbCommand, help="List cached models.", examples=("quire ls", "quire ls --json"))
def ls_command() -> None:
    """List the cached models."""
    from quire.weights.model_cache import list_cached

    output = output_of()
    cached = list_cached()
    if output.json:
        models = [
            {"name": item.name, "origin": item.origin, "path": str(item.path), "size_bytes": item.size_bytes}
            for item in cached
        ]
        output.result_json("quire.ls/1", {"models": models})
    elif cached:
        rows = [[item.name, format_bytes(item.size_bytes), item.origin, str(item.path)] for item in cached]
        output.table(["name", "size", "origin", "path"], rows, right=frozenset({1}))
    else:
        output.note(f"no models yet   next: quire pull {EngineOptions.model}")


@click.command(
    "rm", cls=VerbCommand, help="Remove a model from the cache.",
    examples=("quire rm smollm2", "quire rm smollm2 --yes"),
)  # fmt: skip
@click.argument("model")
@click.option("-y", "--yes", is_flag=True, cls=GroupedOption, help="do not ask")
def rm_command(model: str, yes: bool) -> None:
    """Remove one cached model, after asking on a terminal; elsewhere `--yes` is needed."""
    from quire.weights.model_cache import find_cached, remove_cached

    output = output_of()
    found = find_cached(model)
    size = format_bytes(found.size_bytes)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"removing '{model}' ({size}) needs --yes where nobody can be asked")
        if not click.confirm(f"Remove {found.path} ({size})?", err=True):
            output.note(f"kept {found.name}")
            return
    remove_cached(found.name)
    if output.json:
        output.result_json("quire.rm/1", {"removed": found.name, "size_bytes": found.size_bytes})
    else:
        output.note(f"removed {found.name}, {size} freed")
