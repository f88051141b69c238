"""`quire version`."""

from quire import __version__
from quire.cli.version import package_version
from tests.cli.command_line import call, parsed


def test_version() -> None:
    assert call("version").stdout == f"quire {__version__}\n"
    assert call("--version").stdout == f"quire {__version__}\n"


def test_json_names_the_packages() -> None:
    value = parsed(call("version", "--json"))
    assert value["schema"] == "quire.version/1"
    assert value["version"] == __version__
    assert value["torch"] == package_version("torch")
    assert value["python"].startswith("3.")


def test_verbose_adds_the_packages() -> None:
    assert f"\ntorch {package_version('torch')}\n" in call("version", "-v").stdout


def test_absent_package() -> None:
    assert package_version("no-such-package-as-this") is None
