"""The Click command of every verb: option groups in its help, worked examples, shared output options, the log,
exit codes, `--lang`.

`--json`, `-q`, `-v` and `--color` work before and after the verb's name and write to one `Output`.
Must not know any verb, nor import anything but click. Next to read: `options.py`.
"""

import enum
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import click

from quire.cli.terminal import COLOR_CHOICES, Output
from quire.logs import LEVEL_VARIABLE, level_of_environment, line_handler

LOGGERS = ("quire", "httpx2")
"""The loggers that a command line sends to stderr: the package's and the HTTP client's."""
OUTPUT_GROUP = "Output"
VERB_GROUP = "Options"
_CONTEXT = "--max-model-len is the context length here"
_THREADS = "the engine takes the CPUs that it may use: `taskset -c 0-3 quire …` gives it four"
_KEY = "keys are not taken from the command line, which others can read: set QUIRE_API_KEY"
_PARALLEL = "--max-num-seqs is the number of sequences that run at once"
_MAX_TOKENS = "--max-tokens is the length of the answer here"
_LAYERS = "a model is on one device: --device cpu, or --device cuda"
_TOOLS = "tools need no option: the chat template tells how calls are written"
OTHER_OPTIONS = {
    "--api-key": _KEY, "-t": _THREADS, "--threads": _THREADS, "--ctx-size": _CONTEXT, "--max-seq-len": _CONTEXT,
    "-ngl": _LAYERS, "--gpu-layers": _LAYERS, "--n-gpu-layers": _LAYERS, "-np": _PARALLEL, "--parallel": _PARALLEL,
    "--predict": _MAX_TOKENS, "--n-predict": _MAX_TOKENS, "--temp": "--temperature is its whole name",
    "--repeat-penalty": "--repetition-penalty is its name here", "-m": "the model is an argument",
    "--enable-auto-tool-choice": _TOOLS, "--tool-call-parser": _TOOLS, "--jinja": _TOOLS,
}  # fmt: skip
"""Options of other engines, with advice. It is shown by verbs that have the option it begins with."""


class GroupedOption(click.Option):
    """An option with the heading of its section of the help."""

    def __init__(self, *args: Any, group: str = VERB_GROUP, **kwargs: Any) -> None:
        self.group = group
        super().__init__(*args, **kwargs)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return Click's record, with a switch written short: `--[no-]ignore-eos`."""
        record = super().get_help_record(ctx)
        if record is None or not self.secondary_opts:
            return record
        return f"--[no-]{self.opts[0][2:]}", record[1]


option = functools.partial(click.option, cls=GroupedOption)
"""Decorator that adds an option to a verb."""


class VerbCommand(click.Command):
    """A verb: grouped options and examples in the help, shared output options added.

    `examples`: whole command lines, shown at the end of the help and in the reference. `log_level`: of the log on
    stderr, unless options or the environment choose another.
    """

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), log_level: str = "WARNING", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples
        self._log_level = log_level
        self.params.extend(output_options())

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, with the package's log on stderr."""
        configure_logging(output_of(ctx), self._log_level)
        return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as Click does, but for another engine's option name this one's in the error."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            advice = OTHER_OPTIONS.get(error.option_name, "")
            needed = re.match(r"--[a-z-]+", advice)
            known = {name for parameter in self.params for name in parameter.opts}
            if not advice or (needed and needed[0] not in known):
                raise
            raise click.UsageError(f"No such option '{error.option_name}': {advice}", ctx=ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per option group, in order of first use."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(group_of(parameter), []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the worked examples."""
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"  {example}\n")


def verb(
    name: str, examples: tuple[str, ...], *, help: str | None = None, log_level: str = "WARNING"
) -> Callable[[Callable[..., Any]], VerbCommand]:
    """Decorate a function as the verb `name`; its docstring is the help unless `help` is given."""
    return click.command(name, cls=VerbCommand, examples=examples, help=help, log_level=log_level)


def configure_logging(output: Output, usual: str) -> None:
    """Send the package's log to stderr, from `QUIRE_LOGGING_LEVEL` on, else `usual`; -vv shows all, -q errors only.

    Mutates: the variable, so that child processes log the same. Raises: ConfigError.
    """
    import logging

    chosen = "DEBUG" if output.verbosity >= 2 else level_of_environment()
    level = chosen or ("ERROR" if output.verbosity < 0 else usual)
    if chosen:
        os.environ[LEVEL_VARIABLE] = chosen
    handler = line_handler()
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        # The HTTP client logs each request as INFO.
        logger.setLevel(level if name == "quire" or level == "DEBUG" else "WARNING")


def group_of(parameter: click.Parameter) -> str:
    """Return the help heading of a parameter; `--help` stands with the output options."""
    return parameter.group if isinstance(parameter, GroupedOption) else OUTPUT_GROUP


def output_of(ctx: click.Context | None = None) -> Output:
    """Return the `Output` of the running command line."""
    found = (ctx or click.get_current_context()).find_object(Output)
    return found if found is not None else Output()


def output_options() -> list[GroupedOption]:
    """Return `--json`, `-q`, `-v` and `--color`, which write to the context's `Output`."""
    return [
        GroupedOption([*names], group=OUTPUT_GROUP, expose_value=False, callback=_apply, **settings)
        for *names, settings in _OUTPUT_OPTIONS
    ]


_OUTPUT_OPTIONS: tuple[tuple[Any, ...], ...] = (
    ("--json", {"is_flag": True, "help": "Print the result as one JSON object."}),
    ("-q", "--quiet", {"is_flag": True, "help": "No progress and no notes on stderr."}),
    ("-v", "--verbose", {"count": True, "help": "More notes on stderr; twice for the debug log."}),
    ("--color", {"type": click.Choice(COLOR_CHOICES), "default": None, "envvar": "QUIRE_COLOR",
                 "help": "Colour: auto, always or never. NO_COLOR and FORCE_COLOR are obeyed."}),
)  # fmt: skip


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


# --- Exit codes: a stable interface for scripts, explained in `docs/cli.md`; errors choose theirs ---


class ExitCode(enum.IntEnum):
    """The value of `$?` in a shell."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    MODEL = 3
    MEMORY = 4
    SERVER = 5
    CHECK_FAILED = 6
    INTERRUPTED = 130
    TERMINATED = 143


# --- `--lang`: the language of fixed sentences; JSON is always English ----------------------------

LANGUAGES = ("en", "zh")
VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first that is set counts, as for other programs."""


def language_of(chosen: str | None) -> str:
    """Return the language to speak: the chosen one, else that of the environment, as the C library reads it."""
    if chosen is not None:
        return chosen
    found = next((value for name in VARIABLES if (value := os.environ.get(name))), "")
    return "zh" if found.lower().startswith("zh") else "en"


def _chosen(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Callable[[str], str]:
    if language_of(value) == "en":
        return str
    from quire.insight.chinese import to_chinese

    return to_chinese


lang_option = option(
    "--lang",
    "translate",
    type=click.Choice(LANGUAGES),
    callback=_chosen,
    help="language of fixed sentences  [zh if LANG begins so, else en]",
)
"""Passes `translate`: a text to the same text in the chosen language."""


def is_english(translate: Callable[[str], str]) -> bool:
    """Return whether `translate` leaves texts as they are."""
    return translate is str
