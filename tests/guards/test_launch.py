"""`.vscode/launch.json`: each configuration names a Python, modules, files and options that exist."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from quire.cli.main import cli

ROOT = Path(__file__).parents[2]
CONFIGURATIONS = json.loads((ROOT / ".vscode" / "launch.json").read_text())["configurations"]
VARIABLES = {"workspaceFolder": str(ROOT), "file": __file__}
"""Variables of VS Code that a value may have; `file` is the file in the editor."""


def filled(value: str) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: VARIABLES[match[1]], value)


@pytest.mark.parametrize("item", CONFIGURATIONS, ids=lambda item: item["name"])
def test_configuration_starts_what_exists(item: dict[str, Any]) -> None:
    assert (item["type"], item["request"]) == ("debugpy", "launch")
    assert Path(filled(item["cwd"])) == ROOT
    makefile = (ROOT / "Makefile").read_text()
    assert "VENV ?= .venv\n" in makefile
    assert filled(item["python"]) == str(ROOT / ".venv" / "bin" / "python")
    arguments = [filled(argument) for argument in item["args"]]
    assert importlib.util.find_spec(item["module"]) is not None
    if item["module"] == "quire":
        name, command, rest = cli.resolve_command(click.Context(cli, info_name="quire"), arguments)
        assert command is not None
        with command.make_context(name, rest, parent=click.Context(cli, info_name="quire")):
            pass
    else:
        assert item["module"] == "pytest"
        files = [argument for argument in arguments if not argument.startswith("-")]
        assert [path for path in files if not (ROOT / path).is_file()] == []
        assert files


def test_configurations_debug_an_answer_a_test_and_the_engine_process() -> None:
    assert len({item["name"] for item in CONFIGURATIONS}) == len(CONFIGURATIONS)
    verbs = {item["args"][0]: item for item in CONFIGURATIONS if item["module"] == "quire"}
    assert {"run", "serve"} <= set(verbs)
    assert verbs["serve"]["subProcess"] is True, "the engine runs in a child process"
    assert any(item["module"] == "pytest" for item in CONFIGURATIONS)
