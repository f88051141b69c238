"""Commands that install what an extra adds: they must work where no index has Quire."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from quire.extras import install_command

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def packages(extra: str) -> set[str]:
    own = {re.split(r"[<>=]", item)[0] for item in EXTRAS[extra] if not item.startswith("quire[")}
    inner = [item.removeprefix("quire[").removesuffix("]") for item in EXTRAS[extra] if item.startswith("quire[")]
    return own.union(*map(packages, inner))


@pytest.mark.parametrize("extra", ["torch", "hf", "ray", "otel"])
def test_command_names_every_package_of_an_extra_and_not_quire(extra: str) -> None:
    found = re.findall(r"'([\w-]+)[<>=][^']*'", install_command(extra))
    assert set(found) == packages(extra)
    assert "quire" not in install_command(extra)


def test_quire_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", fail)
    assert install_command.__wrapped__("torch") == "pip install 'quire[torch]'"
