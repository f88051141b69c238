"""`quire version` and `quire completion`: versions of Quire and its dependencies, completion scripts of shells.

Imports none of the dependencies. Next to read: `doctor.py`.
"""

import platform

import click

from quire import __version__
from quire.cli.command import output_of, verb
from quire.cli.main import COMPLETION_VARIABLE

COMPLETION_EXAMPLES = (
    'eval "$(quire completion bash)"',
    'eval "$(quire completion zsh)"',
    "quire completion fish | source",
)
PACKAGES = ("torch", "numpy", "tokenizers", "huggingface-hub")
"""Dependencies that results and speed depend on."""


@verb("version", ("quire version", "quire version --json"))
def version_command() -> None:
    """Print the version."""
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


@verb("completion", COMPLETION_EXAMPLES)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion_command(shell: str) -> None:
    """Print the completion script of a shell.

    Load it in the shell's start file, as the examples do: ~/.bashrc, ~/.zshrc (after compinit),
    ~/.config/fish/config.fish.
    """
    from click.shell_completion import get_completion_class

    output = output_of()
    found = get_completion_class(shell)
    assert found is not None
    # `source` of bash starts a bash to find its version, and only the version decides about a warning.
    maker = found(click.get_current_context().find_root().command, {}, "quire", COMPLETION_VARIABLE)
    script = maker.source_template % maker.source_vars()
    if output.json:
        output.result_json("quire.completion/1", {"shell": shell, "script": script})
    else:
        output.result(script)
