"""Writes the generated part of the command reference, `docs/cli.md`, from the Click commands themselves.

The text before and after that part is written by hand. `python -m tests.cli.reference` writes the page; with `--check`
it exits 1 if the page is stale. Next to read: `quire/cli/main.py`.
"""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from quire.cli.command import OUTPUT_GROUP, ExitCode, VerbCommand, group_of
from quire.cli.main import all_verbs, cli

PAGE = Path("docs/cli.md")
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "success (also when the reader of a pipe closed it early)",
    ExitCode.INTERNAL: "internal error: a bug in Quire; or the output cannot be written",
    ExitCode.USAGE: "usage: a bad command line, option or request",
    ExitCode.MODEL: "the model cannot be found, downloaded, read or computed",
    ExitCode.MEMORY: "it does not fit in memory",
    ExitCode.SERVER: "a server cannot be reached, refuses the key, or fails",
    ExitCode.CHECK_FAILED: "a check failed: `doctor` found a problem, `bench serve` exceeded a limit, `batch` has "
    "lines that failed, `compare` or `diff` got different outputs",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C (SIGINT); 0 if `serve` completed its requests first",
    ExitCode.TERMINATED: "terminated (SIGTERM); `serve` as above",
}


def render() -> str:
    """Return the generated part: verbs, options and exit codes."""
    context = click.Context(cli, info_name="quire")
    parts = ["\n## Verbs\n", _table(("verb", "what it does"), [_verb_row(name) for name in all_verbs()])]
    for name in all_verbs():
        command = cli.get_command(context, name)
        assert isinstance(command, VerbCommand)
        parts.append(_verb_section(name, command, context))
    codes = [(str(int(code)), meaning) for code, meaning in MEANINGS.items()]
    return "\n".join([*parts, "## Exit codes\n", _table(("code", "meaning"), codes)])


def write_page(path: Path, generated: str, module: str, arguments: list[str]) -> int:
    """Write the generated part of a page, or check it with `--check`. `module` makes it. Returns: the exit code."""
    page = path.read_text(encoding="utf-8")
    fresh = page[: page.index(BEGIN) + len(BEGIN)] + generated + page[page.index(END) :]
    if arguments != ["--check"]:
        path.write_text(fresh, encoding="utf-8")
    elif page != fresh:
        sys.stderr.write(f"{path} is stale: run python -m {module}\n")
        return 1
    return 0


def main(arguments: list[str]) -> int:
    """Write the page, or check it with `--check`; returns the exit code."""
    return write_page(PAGE, render(), "tests.cli.reference", arguments)


def _verb_row(name: str) -> tuple[str, str]:
    return f"[`{name}`](#quire-{name.replace(' ', '-')})", all_verbs()[name].summary


def _verb_section(name: str, command: VerbCommand, context: click.Context) -> str:
    own = click.Context(command, info_name=name, parent=context)
    usage = " ".join(["quire", name, *command.collect_usage_pieces(own)])
    examples = "\n".join(example.strip() for example in command.examples)
    lines = [f"## quire {name}\n", inspect.cleandoc(command.help or "") + "\n", f"```sh\n{usage}\n\n{examples}\n```\n"]
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for parameter in command.params:
        # The output options are the same for each verb: the page's head has them.
        if isinstance(parameter, click.Option) and group_of(parameter) != OUTPUT_GROUP:
            groups.setdefault(group_of(parameter), []).append(_option_row(parameter, own))
    for group, rows in groups.items():
        lines += [f"### {group}\n" if len(groups) > 1 else "", _table(("option", "meaning", "variable"), rows)]
    return "\n".join(line for line in lines if line)


def _option_row(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    record = option.get_help_record(context)
    assert record is not None
    variable = str(option.envvar or "")
    text = record[1].replace(f"; {variable}]", "]").replace(f"  [{variable}]", "")
    return f"`{record[0]}`", text, f"`{variable}`" if variable else ""


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
