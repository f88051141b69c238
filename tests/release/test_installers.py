"""The index that `release/check_installers.py` serves to uvx and pipx; `make wheel-check` runs the installers."""

import urllib.request
from pathlib import Path

import pytest

from tests.release.scripts import load_script

INSTALLERS = load_script("release/check_installers.py")


def test_index_lists_each_wheel_and_serves_it(tmp_path: Path) -> None:
    wheels = [tmp_path / f"quire-0.1.0-cp31{minor}-x.whl" for minor in (1, 2)]
    for wheel in wheels:
        wheel.write_text(wheel.name)
    url = INSTALLERS.serve(INSTALLERS.make_index(wheels, tmp_path / "index"))
    with urllib.request.urlopen(f"{url}/quire/") as page:
        text = page.read().decode()
    for wheel in wheels:
        assert f'<a href="{wheel.name}" data-requires-python="&gt;=3.11">' in text
        with urllib.request.urlopen(f"{url}/quire/{wheel.name}") as file:
            assert file.read().decode() == wheel.name


def test_answer_about_something_else_fails_the_check() -> None:
    INSTALLERS.expect_answer("uvx", "light is scattered")
    with pytest.raises(SystemExit, match="uvx: an answer about something else"):
        INSTALLERS.expect_answer("uvx", "bananas")
