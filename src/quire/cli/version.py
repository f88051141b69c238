"""`quire version`: versions of Quire and its dependencies, without importing them. Next to read: `doctor.py`."""

import platform

import click

from quire import __version__
from quire.cli.command import VerbCommand, output_of

PACKAGES = ("torch", "numpy", "tokenizers", "huggingface-hub")
"""Dependencies that results and speed depend on."""


@click.command(
    "version", cls=VerbCommand, help="Print the version.", examples=("quire version", "quire version --json")
)
def version_command() -> None:
    """Print Quire's version; with `-v` and `--json` also those of Python and of the packages below it."""
    output = output_of()
    if output.json:
        output.result_json("quire.version/1", {"version": __version__, **_environment()})
        return
    output.result(f"quire {__version__}")
    for name, value in _environment().items() if output.verbosity > 0 else ():
        output.result(f"{name} {value or 'not installed'}")


def _environment() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    return versions | {name: package_version(name) for name in PACKAGES}


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution from its metadata; None if it is absent."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
