"""The root group: help, log, exit codes, error lines, signals, closed streams, and the cost of its imports."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from quire import __version__
from quire.cli.command import ExitCode, configure_logging
from quire.cli.main import all_verbs, cli, package_version
from quire.cli.terminal import Output
from quire.errors import ConfigError, MemoryCapacityError, ModelFileError, QuireError
from tests.cli.command_line import call, call_process, parsed
from tests.cli.reference import MEANINGS

HEAVY = ("torch", "numpy", "rich", "transformers", "tokenizers", "jinja2", "psutil")


def test_help_and_version_import_nothing_heavy() -> None:
    """Top-level help takes 60 ms with 130 modules on the development machine; the count does not depend on it."""
    code = (
        "import sys, quire.cli.main as m\n"
        "for arguments in (['--help'], ['version', '--json'], ['run', '--help'], ['chat', '--help']):\n"
        "    try: m.main(arguments)\n"
        "    except SystemExit as ended: code = ended.code\n"
        f"    found = [n for n in {(*HEAVY, 'httpx2')!r} if n in sys.modules]\n"
        "    verbs = sorted({verb.module for verb in m.all_verbs().values()} & set(sys.modules) - {m.__name__})\n"
        "    print(found, code, len(sys.modules), verbs, file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = result.stderr.splitlines()
    assert all(line.startswith("[] 0 ") for line in lines)
    assert int(lines[0].split()[2]) < 200
    assert lines[0].endswith(" []"), "top-level help imports no verb"


@pytest.mark.parametrize("verb", all_verbs())
def test_help_of_a_verb_has_all_options_and_examples(verb: str) -> None:
    result = call(verb, "--help")
    assert result.exit_code == 0, result.stderr
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    words = " ".join(result.stdout.split())
    for parameter in command.params:
        for name in parameter.opts if isinstance(parameter, click.Option) else ():
            assert name in words or f"--[no-]{name[2:]}" in words, name
    assert result.stdout.index("Output:") < result.stdout.index("Examples:")
    assert any(verb in line and all_verbs()[verb].summary in line for line in call("--help").stdout.splitlines())


def test_every_exit_code_is_explained_and_every_error_has_one() -> None:
    assert list(MEANINGS) == list(ExitCode)
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 5, 6, 130, 143]
    errors = [QuireError]
    for error in errors:
        errors += error.__subclasses__()
    assert {error.exit_code for error in errors} <= {int(code) for code in ExitCode}


def test_version_names_the_packages() -> None:
    assert call("version").stdout == call("--version").stdout == f"quire {__version__}\n"
    value = parsed(call("version", "--json"))
    assert (value["schema"], value["version"]) == ("quire.version/1", __version__)
    assert value["torch"] == package_version("torch")
    assert f"\ntorch {value['torch']}\n" in call("version", "-v").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_completes_verbs(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = call("completion", shell).stdout
    assert f"_QUIRE_COMPLETE={shell}_complete" in script
    assert parsed(call("completion", shell, "--json"))["script"] == script.removesuffix("\n")
    environment = {
        "_QUIRE_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": "quire vers",
        "COMP_CWORD": "vers" if shell == "fish" else "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert "version" in call().stdout


@pytest.mark.parametrize(
    ("verbosity", "variable", "level"),
    [
        (0, None, "WARNING"),
        (2, None, "DEBUG"),
        (-1, None, "ERROR"),
        (0, "info", "INFO"),
    ],
)
def test_log_level(verbosity: int, variable: str | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", variable or "")
    output = Output()
    output.verbosity = verbosity
    logger = logging.getLogger("quire")
    before = (logger.level, list(logger.handlers))
    try:
        configure_logging(output, "WARNING")
        configure_logging(output, "WARNING")
        assert logging.getLevelName(logger.level) == level
        assert len(logger.handlers) == 1
        monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "trace")
        output.verbosity = 0
        with pytest.raises(ConfigError, match="QUIRE_LOGGING_LEVEL='TRACE' is not one of DEBUG, INFO"):
            configure_logging(output, "WARNING")
    finally:
        logger.setLevel(before[0])
        logger.handlers[:] = before[1]


@pytest.mark.parametrize(
    ("variable", "verb"), [("QUIRE_TEMPERATURE", "run"), ("QUIRE_PORT", "serve"), ("QUIRE_COLOR", "version")]
)
def test_bad_value_of_the_environment_names_its_variable(
    variable: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "tcp://10.0.0.1")
    result = call(verb)
    assert result.exit_code == 2
    assert "'tcp://10.0.0.1' is not" in result.stderr
    assert f"; it comes from {variable} (see " in result.stderr
    monkeypatch.delenv(variable)
    assert "it comes from" not in call("run", "--temperature", "x").stderr


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (ModelFileError("x.gguf: truncated"), "error[model_file_invalid]: x.gguf: truncated", 3),
        (MemoryCapacityError("needs 2 GiB"), "error[out_of_memory]: needs 2 GiB", 4),
        (QuireError("two\nlines"), "error[internal_error]: two lines", 1),
        (ZeroDivisionError("oh"), "internal error: ZeroDivisionError: oh (QUIRE_DEBUG=1 for the traceback)", 1),
        (
            MemoryError(),
            "error[out_of_memory]: the process ran out of memory; lower --max-num-seqs or --max-model-len",
            4,
        ),
        (KeyboardInterrupt(), "", 130),
    ],
)
def test_error_becomes_one_line_and_an_exit_code(
    error: BaseException, line: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("quire.cli.main._environment", fail)
    result = call("version", "--json")
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.strip() == line
    monkeypatch.setenv("QUIRE_DEBUG", "1")
    assert ("Traceback" in call("version", "--json").stderr) is isinstance(error, Exception)


def test_broken_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = call_process("--help", stdout=writer, stderr=subprocess.PIPE, capture_output=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_with_its_code(number: signal.Signals, code: int) -> None:
    script = (
        "import threading, quire.cli.main as m\n"
        "m._environment = lambda: (print('ready', flush=True), threading.Event().wait())\n"
        "m.main(['version', '--json'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (code, "")


def test_no_arguments_show_the_help() -> None:
    result = call()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "run" in result.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&- 2>&-"])
def test_streams_may_be_closed(closed: str) -> None:
    command = ["bash", "-c", f'exec "$0" -m quire version {closed}', sys.executable]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_characters_outside_the_encoding_are_replaced() -> None:
    missing = call_process("show", "mod\u00e8le", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "mod?le" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_full_disk_is_an_output_error_and_ignored_below_notes() -> None:
    with open("/dev/full", "w") as full:
        result = call_process("version", stdout=full, stderr=subprocess.PIPE, capture_output=False)
        noted = call_process("ls", stdout=subprocess.PIPE, stderr=full, capture_output=False)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("error[output]: the output cannot be written: no space is left")
    assert noted.returncode == 0


def interrupted_while_importing(
    tmp_path: Path, module: str, *arguments: str, verb: str = "version"
) -> subprocess.CompletedProcess[str]:
    """`python -m quire`, to which a Ctrl-C comes when `module` is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [*arguments, sys.executable, "-m", "quire", verb], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_early_interrupt_is_quiet(tmp_path: Path) -> None:
    for module, code in (("quire.cli.main", -signal.SIGINT), ("click", -signal.SIGINT), ("quire.cli.models", 130)):
        result = interrupted_while_importing(tmp_path, module, verb="ls")
        assert (result.returncode, result.stdout, result.stderr) == (code, "", ""), module


def test_interrupt_ignored_by_the_shell_stays_ignored(tmp_path: Path) -> None:
    result = interrupted_while_importing(tmp_path, "click", "sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("quire ")
