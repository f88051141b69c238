import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import DownloadError, ModelNotFoundError
from quire.weights.model_cache import (
    CachePlace,
    cache_directory,
    find_cached,
    hub_cache_directory,
    list_cached,
    remove_cached,
)
from tests.hostile_files import make_fifo


def publish(name: str, content: bytes = b"GGUF1234") -> Path:
    entry = CachePlace(f"{name}-1.0")
    with entry.locked():
        (entry.staged_directory / "model.gguf").write_bytes(content)
        return entry.publish(name, f"pypi:{name}==1.0", entry.staged_directory / "model.gguf")


def hub_model(cache: Path, name: str = "org/model", commit: str = "c1", file: str = "config.json") -> Path:
    repository = cache / ("models--" + name.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "blobs" / f"blob-{commit}").write_bytes(bytes(100))
    (snapshot / file).symlink_to(repository / "blobs" / f"blob-{commit}")
    return snapshot


def test_directories_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("QUIRE_CACHE_DIR", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "quire"
    assert hub_cache_directory() == tmp_path / "huggingface" / "hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub_cache_directory() == tmp_path / "home" / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert hub_cache_directory() == tmp_path / "hub"
    monkeypatch.setenv("QUIRE_CACHE_DIR", "~/elsewhere")
    assert cache_directory() == Path.home() / "elsewhere"


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_hub_directory_is_that_of_huggingface_hub(tmp_path: Path, variable: str) -> None:
    # A process of its own: huggingface_hub reads the environment when it is imported.
    code = "from huggingface_hub import constants; from quire.weights.model_cache import hub_cache_directory as ours; "
    code += "print(constants.HF_HUB_CACHE, ours(), sep=chr(10))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "XDG_"))}
    environment = {**kept, variable: str(tmp_path / "chosen")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    theirs, ours = result.stdout.splitlines()
    assert ours == theirs
    assert ours.startswith(str(tmp_path / "chosen"))


def test_published_entries_are_found(empty_caches: Path) -> None:
    path = publish("tiny")
    (model,) = list_cached()
    assert CachePlace("tiny-1.0").find() == model
    assert (model.name, model.path, model.origin, model.size_bytes) == ("tiny", path, "pypi:tiny==1.0", 8)
    assert list((empty_caches / "partial").iterdir()) == []


def test_fifo_in_the_place_of_a_manifest_means_not_cached(empty_caches: Path) -> None:
    path = publish("tiny").with_name("manifest.json")
    path.rename(path.with_name("kept"))
    make_fifo(path)
    assert CachePlace("tiny-1.0").find() is None
    path.unlink()
    path.with_name("kept").rename(path)
    assert CachePlace("tiny-1.0").find() is not None


@pytest.mark.parametrize(
    "manifest", ["", "{", "[]", "{}", '{"name": "x"}', '{"name":1,"origin":1,"file_name":1,"size_bytes":1,"sha256":1}',
                 '{"name":"x","origin":"x","file_name":"../x","size_bytes":1,"sha256":""}']
)  # fmt: skip
def test_bad_manifest_means_not_cached(empty_caches: Path, manifest: str) -> None:
    path = publish("tiny")
    (path.parent / "manifest.json").write_text(manifest)
    assert CachePlace("tiny-1.0").find() is None
    assert list_cached() == []


def test_error_while_locked_leaves_the_old_entry(empty_caches: Path) -> None:
    path = publish("tiny")

    def interrupted_fetch(entry: CachePlace) -> None:
        with entry.locked():
            (entry.staged_directory / "model.gguf").write_bytes(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_fetch(CachePlace("tiny-1.0"))
    assert path.read_bytes() == b"GGUF1234"
    assert list((empty_caches / "partial").iterdir()) == []


def test_hub_models_are_listed(empty_caches: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub_model(hub, commit="c1")
    snapshot = hub_model(hub, commit="c2")
    (hub / "models--org--model" / "refs").mkdir()
    (hub / "models--org--model" / "refs" / "main").write_text("c2")
    hub_model(hub, "org/quant", file="x.gguf")
    hub_model(hub, "org/tokenizer-only", file="tokenizer.json")
    (hub / "datasets--org--data").mkdir()
    (hub / "version.txt").touch()
    models = list_cached()
    assert [(model.name, model.origin, model.size_bytes) for model in models] == [
        ("org/model", "hub:org/model@c2", 200),
        ("org/quant", "hub:org/quant@c1", 100),
    ]
    assert models[0].path == snapshot


def test_removing(empty_caches: Path, tmp_path: Path) -> None:
    path = publish("tiny")
    publish("other")
    snapshot = hub_model(tmp_path / "hub")
    assert remove_cached("tiny").path == path
    assert not path.exists()
    assert remove_cached("org/model").path == snapshot
    assert not (tmp_path / "hub" / "models--org--model").exists()
    assert remove_cached("pypi:other==1.0").name == "other"
    assert list_cached() == []


def test_finding_by_name_or_origin(empty_caches: Path) -> None:
    path = publish("tiny")
    assert find_cached("tiny").path == find_cached("pypi:tiny==1.0").path == path
    with pytest.raises(ModelNotFoundError, match="cached are: tiny"):
        find_cached("tin")


@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.ENOSPC, "No space left on device; free space there, or set QUIRE_CACHE_DIR to another directory"),
        (errno.EROFS, "Read-only file system; set QUIRE_CACHE_DIR to a directory that can be written"),
        (errno.EACCES, "Permission denied; set QUIRE_CACHE_DIR to a directory that can be written"),
    ],
)
def test_hint_follows_the_reason_why_the_cache_cannot_be_written(empty_caches: Path, number: int, hint: str) -> None:
    with pytest.raises(DownloadError, match=f"cannot write the cache in {empty_caches}: {hint}$"):
        fail_to_write(number)


def fail_to_write(number: int) -> None:
    with CachePlace("tiny-1.0").locked():
        raise OSError(number, os.strerror(number))


def test_removing_what_is_not_there(empty_caches: Path) -> None:
    publish("smollm2")
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'smollm2'\?.*cached are: smollm2"):
        remove_cached("smolm2")
