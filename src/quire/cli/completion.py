"""`quire completion`: the script that completes verbs, options and files in a shell. Next to read: `main.py`."""

import click

from quire.cli.command import VerbCommand, output_of
from quire.cli.main import COMPLETION_VARIABLE

HELP = """Print the completion script of a shell.

Load it in the shell's start file, as the examples do: ~/.bashrc, ~/.zshrc (after compinit),
~/.config/fish/config.fish.
"""
EXAMPLES = (
    'eval "$(quire completion bash)"', 'eval "$(quire completion zsh)"', "quire completion fish | source",
)  # fmt: skip


@click.command(
    "completion", cls=VerbCommand, help=HELP, short_help="Print the completion script of a shell.", examples=EXAMPLES
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
