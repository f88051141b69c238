"""The root group: exit codes, error lines, and what importing it costs."""

import os
import signal
import subprocess
import sys
import time

import click
import pytest

from quire.cli.main import VERBS, cli
from quire.errors import MemoryCapacityError, ModelFileError, QuireError
from tests.cli.command_line import call, call_process

HEAVY = ("torch", "numpy", "rich", "transformers", "tokenizers", "jinja2", "psutil")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["version"], ["--version"], ["version", "--json"], ["run", "--help"]]
)
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, quire.cli.main as m\n"
        f"try: m.main({arguments!r})\n"
        f"except SystemExit as e: print([n for n in {HEAVY!r} if n in sys.modules], e.code, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[] 0"


@pytest.mark.parametrize("argument", ["--help", "version"])
def test_help_and_version_stay_small(argument: str) -> None:
    """They take 60 ms with 130 modules on the development machine; the count does not depend on the machine's speed."""
    code = (
        "import sys, quire.cli.main as m\n"
        f"try: m.main([{argument!r}])\n"
        "except SystemExit: print(len(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stderr) < 200


def test_top_level_help_imports_no_verb() -> None:
    code = (
        "import sys, quire.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit: print(sorted({v.module for v in m.VERBS.values()} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_all_its_options_and_two_examples(verb: str) -> None:
    result = call(verb, "--help")
    assert result.exit_code == 0, result.stderr
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    words = " ".join(result.stdout.split())
    for parameter in command.params:
        for name in parameter.opts if isinstance(parameter, click.Option) else ():
            assert name in words or f"--[no-]{name[2:]}" in words, name
    assert result.stdout.count(f"  quire {verb}") >= 2 or verb in ("doctor", "version")
    for shared in ("--json", "--quiet", "--verbose", "--color"):
        assert shared in words


@pytest.mark.parametrize("verb", VERBS)
def test_summary_in_the_table_is_the_verbs_own(verb: str) -> None:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    assert command.get_short_help_str(200) == VERBS[verb].summary.rstrip(".") or (
        command.get_short_help_str(200) == VERBS[verb].summary
    )


def test_top_level_help_lists_every_verb() -> None:
    result = call("--help")
    assert result.exit_code == 0
    for verb, entry in VERBS.items():
        assert any(verb in line and entry.summary in line for line in result.stdout.splitlines())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["versoin"], "did you mean 'version'?"),
        (["version", "--jsn"], "'--json'"),
        (["run", "--temprature", "1", "hi there"], "'--temperature'"),
    ],
)
def test_unknown_words_name_the_nearest(arguments: list[str], named: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error[usage]: ")
    assert result.stderr.count("\n") == 1
    assert named in result.stderr


@pytest.mark.parametrize(
    ("variable", "verb"), [("QUIRE_TEMPERATURE", "run"), ("QUIRE_PORT", "serve"), ("QUIRE_COLOR", "version")]
)
def test_a_bad_value_of_the_environment_names_its_variable(
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
def test_errors_become_one_line_and_an_exit_code(
    error: BaseException, line: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("quire.cli.version._environment", fail)
    result = call("version", "--json")
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.strip() == line


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.cli.version._environment", lambda: 1 / 0)
    monkeypatch.setenv("QUIRE_DEBUG", "1")
    result = call("version", "--json")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("internal error: ZeroDivisionError")


def test_color_always_colours_the_error_and_never_does_not() -> None:
    assert "\x1b[" in call("--color", "always", "show", "/missing.gguf").stderr
    assert "\x1b[" not in call("--color", "never", "show", "/missing.gguf").stderr


def test_broken_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1); import quire.cli.main as m; m.main(['--help'])"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_have_their_codes(number: signal.Signals, code: int) -> None:
    script = (
        "import time, quire.cli.main as m, quire.cli.version as v\n"
        "v._environment = lambda: (print('ready', flush=True), time.sleep(60))\n"
        "m.main(['version', '--json'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in errors


def test_python_dash_m_is_the_same_command() -> None:
    result = call_process("version")
    assert (result.returncode, result.stdout, result.stderr) == (0, call("version").stdout, "")


def test_no_arguments_show_the_help() -> None:
    result = call_process()
    assert result.returncode == 2
    assert result.stdout == ""
    assert "run" in result.stderr


def test_a_full_disk_is_no_internal_error() -> None:
    with open("/dev/full", "w") as full:
        result = call_process("version", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error[output]: the output cannot be written: no space is left")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_streams_may_be_closed(closed: str) -> None:
    command = ["bash", "-c", f'exec "$0" -m quire version {closed}', sys.executable]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_what_the_encoding_lacks_is_replaced() -> None:
    result = call_process("run", "--help", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    missing = call_process("show", "mod\u00e8le", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert missing.returncode == 3
    assert "mod?le" in missing.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_python_drops_comes_again(number: signal.Signals, code: int) -> None:
    script = (
        "import os, time, quire.cli.main as m, quire.cli.version as v\n"
        "class Loud:\n"
        f"    def __del__(self): os.kill(os.getpid(), {int(number)}); time.sleep(0.2)\n"
        "v._environment = lambda: (Loud() and None, time.sleep(60))\n"
        "m.main(['version', '--json'])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def test_what_else_python_drops_is_still_shown() -> None:
    script = (
        "import quire.cli.main as m, quire.cli.version as v\n"
        "class Loud:\n"
        "    def __del__(self): raise ValueError('dropped')\n"
        "known = v._environment\n"
        "v._environment = lambda: (Loud() and None, known())[1]\n"
        "m.main(['version', '--json'])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0
    assert "ValueError: dropped" in result.stderr


def test_notes_and_errors_that_cannot_be_written_change_no_exit_code() -> None:
    with open("/dev/full", "w") as full:
        noted = call_process("ls", stdout=subprocess.PIPE, stderr=full, capture_output=False)
        wrong = call_process("version", "--jsn", stdout=subprocess.PIPE, stderr=full, capture_output=False)
    assert (noted.returncode, wrong.returncode) == (0, 2)
