"""The workflow that builds wheels on GitHub: its wheels are those of `release/wheels.py`, and macOS's."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tests.release.scripts import ROOT, load_script

FILE = ROOT / ".github/workflows/wheels.yml"
WORKFLOW: dict[Any, Any] = yaml.safe_load(FILE.read_text())
JOB = WORKFLOW["jobs"]["wheels"]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
WHEELS, CHECK = load_script("release/wheels.py"), load_script("release/check_wheels.py")


def machines() -> list[dict[str, Any]]:
    return list(JOB["strategy"]["matrix"]["include"])


def test_matrix_has_each_processor_of_the_release_and_macs() -> None:
    by_system: dict[str, list[str]] = {}
    for machine in machines():
        by_system.setdefault(machine["system"], []).append(machine["arch"])
    assert sorted(by_system["linux"]) == sorted(WHEELS.ARCHITECTURES)
    assert by_system["macos"] == ["arm64"]
    assert by_system.keys() == {"linux", "macos"}


def test_each_wheel_is_built_on_its_own_processor() -> None:
    for machine in machines():
        assert machine["runner"].endswith("-arm") == (machine["arch"] == "aarch64")
        assert machine["runner"].startswith({"linux": "ubuntu-", "macos": "macos-"}[machine["system"]])
        assert not machine["runner"].endswith("latest")


def test_settings_name_the_pythons_and_the_glibc_of_the_release() -> None:
    assert SETTINGS["build"] == [f"{tag}-*" for tag in CHECK.SUITES]
    assert SETTINGS["skip"] == ["*-musllinux_*"]
    for arch in WHEELS.ARCHITECTURES:
        assert SETTINGS[f"manylinux-{arch}-image"] == "manylinux_{}_{}".format(*WHEELS.GLIBC)


def test_each_wheel_is_tested_by_the_script_of_wheel_check() -> None:
    script = re.fullmatch(r"python \{project\}/(\S+)", SETTINGS["test-command"])
    assert script is not None
    assert Path(ROOT, script[1]).name == "check_installed.py"
    assert Path(ROOT, script[1]).is_file()


def test_actions_have_versions_and_the_matrix_has_all_that_is_read_of_it() -> None:
    actions = [step["uses"] for step in JOB["steps"]]
    assert [action.split("@")[0] for action in actions] == [
        "actions/checkout", "pypa/cibuildwheel", "actions/upload-artifact",
    ]  # fmt: skip
    assert all(re.fullmatch(r"[\w/-]+@v\d+(\.\d+)*", action) for action in actions)
    read = set(re.findall(r"matrix\.(\w+)", FILE.read_text()))
    assert read
    assert all(read <= machine.keys() for machine in machines())
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_it_says_that_it_has_not_run() -> None:
    assert "NOT YET RUN" in FILE.read_text().splitlines()[0]
