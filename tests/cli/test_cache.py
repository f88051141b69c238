"""`quire cache ls`, `verify` and `clear` on a directory with two models, and on packed weights."""

import hashlib
from pathlib import Path

import pytest

from quire.runtime.block_files import HEADER_BYTES, BlockFiles
from quire.runtime.shared_file import DATA_OFFSET
from tests.cli.command_line import call, parsed
from tests.cli.weight_files import make_weights

SIZE = HEADER_BYTES + 100


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Store three blocks of one model and one of another; one of the three is damaged."""
    for number, (name, num_blocks) in enumerate((("one", 3), ("two", 1))):
        description = {"model": name, "kv_cache_dtype": "int8", "block_size": 32, "made_by": "quire 1"}
        files = BlockFiles(tmp_path / "kv", bytes([number]) * 32, description, 1 << 30)
        for block in range(num_blocks):
            files.write(0, hashlib.sha256(bytes([block])).digest(), memoryview(bytes([block]) * 100))
    path = next((tmp_path / "kv").glob("00*/*.kv"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    return tmp_path / "kv"


def test_ls_lists_blocks_by_model(directory: Path, tmp_path: Path) -> None:
    models = parsed(call("cache", "ls", str(directory), "--json"))["models"]
    assert [(item["model"], item["num_blocks"], item["num_bytes"]) for item in models] == [
        ("one", 3, 3 * SIZE), ("two", 1, SIZE),
    ]  # fmt: skip
    (directory / ("01" * 16) / "model.json").write_text("torn {")
    table = call("cache", "ls", str(directory)).stdout.splitlines()
    assert [line.split()[0] for line in table] == ["model", "one", "unknown"]
    assert "no packed weights and no KV blocks" in call("cache", "ls", str(tmp_path)).stderr


def test_verify_names_damaged_blocks(directory: Path) -> None:
    found = parsed(call("cache", "verify", str(directory), "--json"))
    assert found["num_blocks"] == 4
    assert [item["problem"] for item in found["damaged"]] == ["is damaged"]
    result = call("cache", "verify", str(directory))
    assert result.stdout.strip() == f"{found['damaged'][0]['path']} is damaged"
    assert "4 KV blocks, 1 damaged" in result.stderr


def test_clear_asks_first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = call("cache", "clear", str(directory))
    assert refused.exit_code == 2
    assert "deleting 4 KV blocks needs --yes" in refused.output
    monkeypatch.setenv("QUIRE_KV_DISK", str(directory))
    assert parsed(call("cache", "clear", "--yes", "--json")) == {
        "schema": "quire.cache.clear/1", "num_blocks": 4, "num_weight_files": 0, "num_bytes": 4 * SIZE,
    }  # fmt: skip
    assert parsed(call("cache", "ls", "--json"))["models"][0]["num_blocks"] == 0


@pytest.fixture
def weights() -> list[Path]:
    """Two files of packed weights in the cache, which are on disk."""
    return [make_weights(name, f"/models/{name}") for name in ("one", "two")]


def test_without_a_directory_ls_lists_packed_weights(weights: list[Path]) -> None:
    found = parsed(call("cache", "ls", "--json"))
    assert found["models"] == []
    assert [(item["model"], item["source"], item["path"]) for item in found["weights"]] == [
        ("one", "/models/one", str(weights[0])), ("two", "/models/two", str(weights[1])),
    ]  # fmt: skip
    lines = call("cache", "ls").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["weights", "one", "two"]
    assert "today" in lines[1]


def test_verify_names_packed_weights_that_were_changed_on_disk(weights: list[Path]) -> None:
    assert parsed(call("cache", "verify", "--json")) == {
        "schema": "quire.cache.verify/1", "directory": str(weights[0].parent), "num_blocks": 0, "num_weight_files": 2,
        "damaged": [],
    }  # fmt: skip
    with weights[0].open("r+b") as file:
        file.seek(DATA_OFFSET + 4000)
        file.write(b"?")
    weights[1].write_bytes(b"torn")
    result = call("cache", "verify")
    assert result.stdout.splitlines() == [
        f"{weights[0]} does not have the bytes that were written", f"{weights[1]} is damaged",
    ]  # fmt: skip
    assert "2 files of packed weights, 2 damaged" in result.stderr


def test_clear_deletes_packed_weights(weights: list[Path]) -> None:
    assert "deleting 2 files of packed weights needs --yes" in call("cache", "clear").output
    assert all(path.exists() for path in weights)
    assert parsed(call("cache", "clear", "--yes", "--json"))["num_weight_files"] == 2
    assert not any(path.exists() for path in weights)
    assert "no packed weights" in call("cache", "ls").stderr


def test_verbs_without_a_directory_name_what_switches_weights_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_WEIGHT_CACHE", "off")
    result = call("cache", "ls")
    assert result.exit_code == 2
    assert "QUIRE_WEIGHT_CACHE" in result.stderr
