"""`quire version` and `quire completion`: versions of Quire and its dependencies, completion scripts of shells.

Imports none of the dependencies. Next to read: `doctor.py`.
"""

import platform

import click

from quire import __version__
from quire.cli.command import VerbCommand, output_of
from quire.cli.main import COMPLETION_VARIABLE

COMPLETION_HELP = """Print the completion script of a shell.

Load it in the shell's start file, as the examples do: ~/.bashrc, ~/.zshrc (after compinit),
~/.config/fish/config.fish.
"""
COMPLETION_EXAMPLES = (
    'eval "$(quire completion bash)"', 'eval "$(quire completion zsh)"', "quire completion fish | source",
)  # fmt: skip
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


@click.command(
    "completion",
    cls=VerbCommand,
    help=COMPLETION_HELP,
    short_help="Print the completion script of a shell.",
    examples=COMPLETION_EXAMPLES,
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print Click's script for the shell."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    # `source` of bash starts a bash to find its version, and only the version decides about a warning.
    maker = found(ctx.find_root().command, {}, "quire", COMPLETION_VARIABLE)
    script = maker.source_template % maker.source_vars()
    output = output_of(ctx)
    if output.json:
        output.result_json("quire.completion/1", {"shell": shell, "script": script})
    else:
        output.result(script)
