"""Writes the command reference, `docs/cli.md`, from the Click commands themselves.

`python -m quire.cli.reference` writes it; with `--check` it exits 1 if the file is stale. Next to read: `main.py`.
"""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from quire.cli.command import OUTPUT_GROUP, VerbCommand, group_of
from quire.cli.exit_codes import MEANINGS
from quire.cli.main import VERBS, cli

PAGE = Path("docs/cli.md")
HEADER = """# The `quire` command

<!-- Written by `python -m quire.cli.reference`; a test fails when it is stale. Do not edit. -->

The result of a verb goes to stdout; progress, notes and errors go to stderr. Every verb takes `--json` (one JSON
object whose `schema` names its version), `-q`, `-v` (more notes; `-vv`: the debug log) and `--color`. An error is one
line, `error[code]: message`. In the tables, values in brackets are defaults.

Counts take a suffix: `2k` is 2000, `2K` is 2048, `M` likewise. Bytes: `512MiB`, `2GiB`, `1.5GB`. An option may also be
set by its environment variable; the command line wins. Options that may be repeated are separated by commas there.
"""
OTHER_VARIABLES = {
    "QUIRE_CACHE_DIR": "where fetched models are kept, instead of the user's cache directory",
    "QUIRE_DEBUG": "`1` prints the traceback of an error",
    "QUIRE_LOGGING_LEVEL": "log level on stderr: `DEBUG` (as `-vv`), `INFO`, `WARNING`, `ERROR`",
    "QUIRE_TRACE": "`1` logs shapes, types and microseconds of each op that ran; `events` records them as events",
    "QUIRE_KERNELS": "`reference`, or `op:reference`: runs the model op by op, with reference versions of kernels",
    "QUIRE_ISA": "`scalar`, `avx2`, `avx512`, `avx512_bf16` or `amx`: instruction set of the native kernels",
    "OMP_NUM_THREADS": "number of threads, instead of one per physical core",
    "QUIRE_API_KEY": "the API keys that `quire serve` accepts, separated by commas; clients send the first",
    "OPENAI_API_KEY": "the key that clients (`chat`, `batch`, `top`, …) send where `QUIRE_API_KEY` is not set",
    "QUIRE_COLOR": "`always`, `never` or `auto`, as `--color`",
    "NO_COLOR, FORCE_COLOR": "no colour, or colour also where there is no terminal",
    "HF_HOME, HF_TOKEN, HF_HUB_OFFLINE": "the Hugging Face hub's own: cache, access token, no network",
}


FOOTER = """## Shell completion

`quire completion bash`, `zsh` or `fish` prints a script that completes verbs and options. Load it in the start file:

```sh
eval "$(quire completion bash)"      # in ~/.bashrc
eval "$(quire completion zsh)"       # in ~/.zshrc, after compinit
quire completion fish | source       # in ~/.config/fish/config.fish
```

## OpenTelemetry

`quire serve` sends a span per request, with its time in the queue, in prefill and in decode, to a collector that
speaks OTLP over HTTP. Install the extra and name the collector; OpenTelemetry's other variables hold, too:

```sh
pip install 'quire[otel]'
OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 OTEL_SERVICE_NAME=quire quire serve
```

A request with a `traceparent` header becomes part of that trace. Spans contain counts and times, never text.
`OTEL_SDK_DISABLED=true` turns them off. Metrics are at `/metrics`, in Prometheus's format.
"""


def render() -> str:
    """Return the whole page."""
    context = click.Context(cli, info_name="quire")
    parts = [HEADER, "## Verbs\n", _table(("verb", "what it does"), [_verb_row(name) for name in VERBS])]
    for name in VERBS:
        command = cli.get_command(context, name)
        assert isinstance(command, VerbCommand)
        parts.append(_verb_section(name, command, context))
    codes = [(str(int(code)), meaning) for code, meaning in MEANINGS.items()]
    parts += ["## Exit codes\n", _table(("code", "meaning"), codes)]
    variables = [(f"`{name}`".replace(", ", "`, `"), text) for name, text in OTHER_VARIABLES.items()]
    parts += ["## Other environment variables\n", _table(("variable", "effect"), variables)]
    return "\n".join([*parts, FOOTER])


def main(arguments: list[str]) -> int:
    """Write the page, or check it with `--check`; returns the exit code."""
    if arguments != ["--check"]:
        PAGE.write_text(render(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_bytes() != render().encode():
        sys.stderr.write(f"{PAGE} is stale: run python -m quire.cli.reference\n")
        return 1
    return 0


def _verb_row(name: str) -> tuple[str, str]:
    return f"[`{name}`](#quire-{name.replace(' ', '-')})", VERBS[name].summary


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
