"""The Click command of every verb: option groups in its help, worked examples, shared output options, the log.

`--json`, `-q`, `-v` and `--color` work before and after the verb's name and write to one `Output`.
Must not know any verb, nor import anything but click. Next to read: `options.py`.
"""

import os
import sys
from typing import Any

import click

from quire.cli.other_options import advice
from quire.cli.output import COLOR_CHOICES, Output

LEVEL_VARIABLE = "QUIRE_LOGGING_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
OUTPUT_GROUP = "Output"
VERB_GROUP = "Options"


class GroupedOption(click.Option):
    """An option with the heading of its section of the help."""

    def __init__(self, *args: Any, group: str = VERB_GROUP, **kwargs: Any) -> None:
        self.group = group
        super().__init__(*args, **kwargs)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As Click's, with a switch written short: `--[no-]ignore-eos`."""
        record = super().get_help_record(ctx)
        if record is None or not self.secondary_opts:
            return record
        return f"--[no-]{self.opts[0][2:]}", record[1]


class VerbCommand(click.Command):
    """A verb: grouped options and examples in the help, shared output options added.

    `examples`: whole command lines, shown at the end of the help and in the reference. `log_level`: of the log on
    stderr, unless options or the environment choose another.
    """

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), log_level: str = "WARNING", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self._log_level = log_level
        self.params.extend(_make_output_options())

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, with the package's log on stderr."""
        configure_logging(output_of(ctx), self._log_level)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As Click's, but the error for an option of another engine names the option of this one."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            text = advice(error.option_name, {name for parameter in self.params for name in parameter.opts})
            if text is None:
                raise
            raise click.UsageError(f"No such option '{error.option_name}': {text}", ctx=ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per option group, in order of first use; the output options last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(group_of(parameter), []).append(record)
        for last in (VERB_GROUP, OUTPUT_GROUP):
            if last in sections and (last == OUTPUT_GROUP or len(sections[last]) == 1):
                sections[last] = sections.pop(last)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the worked examples."""
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"  {example}\n")


def configure_logging(output: Output, usual: str) -> None:
    """Send the package's log to stderr, from `QUIRE_LOGGING_LEVEL` on, else `usual`; -vv shows all, -q errors only.

    Mutates: the variable, so that child processes log the same. Raises: ConfigError.
    """
    import logging

    chosen = "DEBUG" if output.verbosity >= 2 else os.environ.get(LEVEL_VARIABLE, "").upper()
    if chosen and chosen not in LOG_LEVELS:
        from quire.errors import ConfigError

        raise ConfigError(f"{LEVEL_VARIABLE}={chosen!r} is not one of {', '.join(LOG_LEVELS)}")
    level = chosen or ("ERROR" if output.verbosity < 0 else usual)
    if chosen:
        os.environ[LEVEL_VARIABLE] = chosen
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for name in ("quire", "httpx2"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        # The HTTP client logs each request as INFO.
        logger.setLevel(level if name == "quire" or level == "DEBUG" else "WARNING")


def group_of(parameter: click.Parameter) -> str:
    """Return the help heading of a parameter."""
    return parameter.group if isinstance(parameter, GroupedOption) else VERB_GROUP


def output_of(ctx: click.Context | None = None) -> Output:
    """Return the `Output` of the running command line."""
    found = (ctx or click.get_current_context()).find_object(Output)
    return found if found is not None else Output()


def output_options(group: click.Group) -> click.Group:
    """Decorate with `--json`, `-q`, `-v` and `--color`, which write to the context's `Output`."""
    group.params[:0] = _make_output_options()
    return group


def _make_output_options() -> list[GroupedOption]:
    return [
        GroupedOption(list(names), group=OUTPUT_GROUP, expose_value=False, callback=_apply, **settings)
        for names, settings in _OUTPUT_OPTIONS
    ]


_OUTPUT_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--json",), {"is_flag": True, "help": "Print the result as one JSON object."}),
    (("-q", "--quiet"), {"is_flag": True, "help": "No progress and no notes on stderr."}),
    (("-v", "--verbose"), {"count": True, "help": "More notes on stderr; twice for the debug log."}),
    (
        ("--color",),
        {
            "type": click.Choice(COLOR_CHOICES),
            "default": None,
            "envvar": "QUIRE_COLOR",
            "help": "Colour: auto, always or never. NO_COLOR and FORCE_COLOR are obeyed.",
        },
    ),
)


def _apply(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    output = ctx.find_object(Output)
    if output is None or not value:
        return
    if parameter.name == "json":
        output.json = True
    elif parameter.name == "quiet":
        output.verbosity = -1
    elif parameter.name == "verbose":
        output.verbosity = int(value)
    else:
        output.color = str(value)
