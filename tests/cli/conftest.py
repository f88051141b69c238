"""No test of the command line sees the developer's settings or caches."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.cli.terminal import Output
from quire.config import EngineOptions
from tests.cli.command_line import FakeEngine
from tests.cli.tiny_directory import make_tiny_directory


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the settings of the developer's shell, and use empty caches."""
    for name in list(os.environ):
        if name.startswith("QUIRE_") or name in ("NO_COLOR", "FORCE_COLOR", "HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LC_ALL", "C.UTF-8")  # commands speak English
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # no server of the developer's is found


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Verbs get a FakeEngine instead of loading a model; the list has those they opened."""
    opened: list[FakeEngine] = []

    @contextmanager
    def open_fake(options: EngineOptions, output: Output, **_: str | None) -> Iterator[FakeEngine]:
        opened.append(FakeEngine(options))
        yield opened[-1]

    monkeypatch.setattr("quire_workshop.cli.bench.open_engine", open_fake)  # first: its import takes the real one
    monkeypatch.setattr("quire.cli.run.open_engine", open_fake)
    return opened


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a tiny model's directory, which no test changes."""
    return str(make_tiny_directory(tmp_path_factory.mktemp("models") / "tiny"))
