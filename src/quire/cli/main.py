"""Entry point: the table of verbs, the root group, which imports a verb on use, and the one place that turns errors
into exits; `quire version` and `quire completion`.

Top level imports only click and the standard library: `quire --help` and `quire version` must not load torch
or numpy (a test looks). Other packages bring verbs by entry points of the group `quire.verbs`: each names such a table,
with plain tuples as rows, in a module that imports nothing. Next to read: `command.py`, then any verb, e.g. `run.py`.
"""

import contextlib
import errno
import functools
import gc
import glob
import importlib
import io
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import click

from quire import __version__
from quire.cli.command import ExitCode, output_of, output_options, verb
from quire.cli.terminal import Output
from quire.errors import InstallationError, QuireError, escaped, nearest

# --- The table of verbs ---------------------------------------------------------------------------


class Verb(NamedTuple):
    """The module of a verb, and its line in the top-level help."""

    section: str
    module: str
    summary: str


SECTIONS = ("Use", "Models", "See inside", "Learn", "Measure", "Operate")
"""Sections of the top-level help in their order; those of other packages' own come last."""

OWN: dict[str, Verb] = {
    "run": Verb("Use", "quire.cli.run", "Answer one prompt, or chat."),
    "chat": Verb("Use", "quire.cli.chat_client", "Chat with a server."),
    "serve": Verb("Use", "quire.cli.serve", "Serve a model over HTTP with OpenAI's API."),
    "batch": Verb("Use", "quire.cli.batch", "Answer a file of requests."),
    "pull": Verb("Models", "quire.cli.models", "Fetch a model into the cache."),
    "ls": Verb("Models", "quire.cli.models", "List cached models."),
    "show": Verb("Models", "quire.cli.models", "Describe a model: architecture, sizes, tensors, tokenizer."),
    "rm": Verb("Models", "quire.cli.models", "Remove a model from the cache."),
    "tokenize": Verb("Models", "quire.cli.models", "Show how text becomes tokens."),
    "explain": Verb("See inside", "quire.cli.explain", "Explain a model's size, memory, work and time."),
    "trace": Verb("See inside", "quire.cli.trace", "Record what the engine does; make a timeline of a recording."),
    "view": Verb("See inside", "quire.cli.explain", "Draw one step: mask, blocks, time, instructions."),
    "top": Verb("Measure", "quire.cli.top", "Watch a server."),
    "ps": Verb("Operate", "quire.cli.top", "List the servers of this machine."),
    "cache ls": Verb("Operate", "quire.cli.cache", "List the KV blocks that --kv-disk keeps."),
    "cache verify": Verb("Operate", "quire.cli.cache", "Find damaged KV blocks."),
    "cache clear": Verb("Operate", "quire.cli.cache", "Delete KV blocks."),
    "doctor": Verb("Operate", "quire.cli.doctor", "Check this machine and installation."),
    "completion": Verb("Operate", "quire.cli.main", "Print the completion script of a shell."),
    "version": Verb("Operate", "quire.cli.main", "Print the version."),
}
"""Each verb `x` is the Click command `x_command` of its module; one of two words `x y` is `x_y_command`."""
GROUP = "quire.verbs"
"""The group of the entry points."""
_REMEDY = "install its package again, or remove it"


def all_verbs() -> dict[str, Verb]:
    """Return the verbs of Quire and of installed packages, section by section. A name that Quire has is Quire's."""
    verbs = {**OWN, **_plugged()[0], **OWN}
    sections = list(dict.fromkeys((*SECTIONS, *(row.section for row in verbs.values()))))
    return dict(sorted(verbs.items(), key=lambda item: sections.index(item[1].section)))


def broken_tables() -> list[str]:
    """Return a line for each table of an installed package that cannot be imported."""
    return _plugged()[1]


def load(name: str) -> click.Command:
    """Import a verb's module and return its command. Raises: InstallationError for a package that does not work."""
    found = OWN[name] if name in OWN else all_verbs()[name]
    try:
        command = getattr(importlib.import_module(found.module), f"{name.replace(' ', '_')}_command")
    except (ImportError, AttributeError, SyntaxError) as error:
        if name in OWN or getattr(error, "name", None) == "quire._native":
            raise
        raise InstallationError(f"'{name}' cannot be imported from {found.module}: {error}; {_REMEDY}") from error
    assert isinstance(command, click.Command)
    return command


@functools.cache
def _plugged() -> tuple[dict[str, Verb], list[str]]:
    """Import the tables of installed packages. Returns: their verbs, and a line for each that cannot be imported."""
    verbs: dict[str, Verb] = {}
    broken = []
    for point, place in _entry_points().items():
        module, _, attribute = place.partition(":")
        try:
            table = getattr(importlib.import_module(module), attribute)
            verbs = {**verbs, **{name: Verb(*row) for name, row in table.items()}, **verbs}
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            broken.append(f"the verbs of '{point}' cannot be imported from {place}: {reason}; {_REMEDY}")
    return verbs, broken


def _entry_points() -> dict[str, str]:
    """Return name and place of each entry point of the group, the first of a name on Python's path.

    `importlib.metadata` finds the same ones in 25 ms, ten times as long.
    """
    found: dict[str, str] = {}
    for folder in sys.path:
        for path in glob.iglob(os.path.join(glob.escape(folder or os.curdir), "*.dist-info", "entry_points.txt")):
            with open(path, encoding="utf-8") as file:
                section = file.read().partition(f"[{GROUP}]\n")[2].partition("\n[")[0]
            for line in filter(None, section.splitlines()):
                name, _, place = line.partition("=")
                found.setdefault(name.strip(), place.strip())
    return found


# --- The root group, and the exits ----------------------------------------------------------------

COMPLETION_VARIABLE = "_QUIRE_COMPLETE"
"""The script of `quire completion` sets it: Click then prints the completions of a command line."""


class Terminated(BaseException):
    """SIGTERM arrived. Not an `Exception`, so that no handler catches it."""


_SIGNAL_EXITS = {KeyboardInterrupt: ExitCode.INTERRUPTED, Terminated: ExitCode.TERMINATED}


class RootGroup(click.Group):
    """Imports a verb when it is named, and ends the process with a documented exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all verbs."""
        return list(all_verbs())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's module and return its command; None if there is no such verb."""
        if cmd_name not in OWN and cmd_name not in all_verbs():
            return None
        command = load(cmd_name)
        gc.enable()  # `__main__.py` disables it
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb as Click does; the error for an unknown one names the nearest, or those that begin so."""
        both = " ".join(args[:2])
        verbs = OWN if args[0] in OWN or both in OWN else all_verbs()
        if both in verbs:
            args = [both, *args[2:]]
        name = args[0]
        if name not in verbs and not name.startswith("-") and not ctx.resilient_parsing:
            longer = ", ".join(verb for verb in verbs if verb.startswith(f"{name} "))
            there = f": there are {longer}" if longer else nearest(name, verbs)
            raise click.UsageError("; ".join([f"no such command '{name}'{there}", *broken_tables()]), ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by section from their tables: their modules are not imported."""
        verbs = all_verbs()
        width = max(map(len, verbs))
        for section in dict.fromkeys(row.section for row in verbs.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name.ljust(width), row.summary) for name, row in verbs.items() if row.section == section]
                )
        for line in broken_tables():
            output_of(ctx).note(line)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        """Run one command line and exit."""
        output = Output()
        extra["obj"] = output
        sys.exit(_run(lambda: self._dispatch(args, prog_name or "quire", extra), output))

    def _dispatch(self, args: Sequence[str] | None, prog_name: str, extra: dict[str, Any]) -> None:
        instruction = os.environ.get(COMPLETION_VARIABLE)
        if instruction:
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(self, extra, prog_name, COMPLETION_VARIABLE, instruction))
        with self.make_context(prog_name, list(sys.argv[1:] if args is None else args), **extra) as ctx:
            self.invoke(ctx)


@click.group(cls=RootGroup, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quire", message="%(prog)s %(version)s")
def cli() -> None:
    """Quire: an LLM inference engine for the machine you have.

    Try: quire run "Why is the sky blue?"
    """


cli.params[:0] = output_options()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the `quire` command."""
    _prepare_signals()
    _prepare_streams()
    try:
        cli.main(args=argv, prog_name="quire")
    except SystemExit as exit_:
        if exit_.code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED):
            _leave_at_once(int(exit_.code))
        raise


def _leave_at_once(exit_code: int) -> NoReturn:
    """End without the destructors of libraries: they may abort if a signal interrupted their start.

    Quire's own context managers have all been left by then.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(exit_code)


def _prepare_signals() -> None:
    """Turn SIGTERM and Ctrl-C into exceptions."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as `__main__.py` leaves it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.unraisablehook = _end_if_signal


def _end_if_signal(unraisable: Any) -> None:
    """End the process if the exception that Python dropped, e.g. in a destructor, is that of a signal."""
    if unraisable.exc_type in _SIGNAL_EXITS:
        _leave_at_once(_SIGNAL_EXITS[unraisable.exc_type])
    sys.__unraisablehook__(unraisable)


def _prepare_streams() -> None:
    """Replace closed streams by empty ones; characters that a stream cannot encode become "?"."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it lives as long as the process
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _run(dispatch: Callable[[], None], output: Output) -> int:
    """Run a command line and report its exception. Returns: the exit code."""
    try:
        try:
            dispatch()
            sys.stdout.flush()
            return ExitCode.OK
        except click.exceptions.Exit as exit_:
            sys.stdout.flush()
            return exit_.exit_code
        except BrokenPipeError:
            raise
        except Terminated:
            return ExitCode.TERMINATED
        except (KeyboardInterrupt, click.Abort):
            return ExitCode.INTERRUPTED
        except Exception as error:
            return _report(error, output)
    except BrokenPipeError:
        return _close_broken_pipe()


def _report(error: Exception, output: Output) -> int:
    """Write the one line that describes `error` to stderr; return the exit code."""
    if os.environ.get("QUIRE_DEBUG", "0") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, QuireError):
        return _fail(output, error.code, error.message, error.exit_code)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        sys.stderr.write(error.format_message() + "\n")
        return ExitCode.USAGE
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        more = f" (see {context.command_path} --help)" if context is not None else ""
        return _fail(output, "usage", error.format_message().rstrip(".") + _variable_of(error) + more, ExitCode.USAGE)
    if isinstance(error, MemoryError):
        message = "the process ran out of memory; lower --max-num-seqs or --max-model-len"
        return _fail(output, "out_of_memory", message, ExitCode.MEMORY)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        message = "the output cannot be written: no space is left on its device; free some, or write it elsewhere"
        return _fail(output, "output", message, ExitCode.INTERNAL)
    if isinstance(error, ModuleNotFoundError) and error.name == "quire._native":
        version = ".".join(map(str, sys.version_info[:2]))
        ways = "run `make run` in the checkout, or install Quire again with this Python's pip"
        message = f"Quire's kernels are not built for Python {version}: {ways}"
        return _fail(output, "installation", message, ExitCode.USAGE)
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return _fail(output, "", f"internal error: {what} (QUIRE_DEBUG=1 for the traceback)", ExitCode.INTERNAL)


def _variable_of(error: click.ClickException) -> str:
    """Name the environment variable that a bad value came from."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    name, variable = error.param.name, error.param.envvar
    is_set = name is not None and error.ctx.get_parameter_source(name) is click.core.ParameterSource.ENVIRONMENT
    return f"; it comes from {variable}" if is_set and isinstance(variable, str) else ""


def _fail(output: Output, code: str, message: str, exit_code: int) -> int:
    if output.logger is not None:
        output.logger.error(" ".join(message.split()), extra={"fields": {"code": code or "internal_error"}})
        return exit_code
    label = f"error[{code}]: " if code else ""
    label = output.style(label, "red", sys.stderr)
    with contextlib.suppress(OSError):
        sys.stderr.write(label + escaped(" ".join(message.split())) + "\n")
        sys.stderr.flush()
    return exit_code


def _close_broken_pipe() -> int:
    # The interpreter flushes stdout once more on exit: give it a stream that accepts that.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OK


def _on_sigterm(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


# --- `quire version`, `quire completion` ----------------------------------------------------------

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
