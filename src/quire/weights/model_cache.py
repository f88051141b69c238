"""Where fetched models lie on disk: Quire's own cache, and the hub's, which it shares with other programs.

Layout of Quire's cache: `pypi/<entry>/` holds a model file and `manifest.json`, and exists only when complete;
`partial/<entry>/` is being filled by whoever holds `locks/<entry>.lock`. Must not fetch anything, and imports neither
numpy nor huggingface_hub: `quire ls` answers from here. Next to read: `pypi_wheel.py`.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.errors import DownloadError, ModelNotFoundError, nearest
from quire.weights.progress import Progress, ignore_progress

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model on this disk. `name` is what `resolve_source` takes."""

    name: str
    path: Path
    origin: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was verified when a cache entry was made; later starts compare only the size."""

    name: str
    origin: str
    file_name: str
    size_bytes: int
    sha256: str


def cache_directory() -> Path:
    """`$QUIRE_CACHE_DIR`, or the user's cache directory for Quire."""
    if chosen := os.environ.get("QUIRE_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("quire", appauthor=False))


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
class CacheEntry:
    """The place of one fetched model in Quire's cache; `key` is a file name."""

    key: str

    @property
    def directory(self) -> Path:
        """Complete or absent."""
        return cache_directory() / "pypi" / self.key

    @property
    def partial_directory(self) -> Path:
        """What the holder of the lock works in."""
        return cache_directory() / "partial" / self.key

    @property
    def staged_directory(self) -> Path:
        """What `publish` turns into the entry: the model file alone."""
        return self.partial_directory / "staged"

    def find(self) -> Path | None:
        """The model file, if it is here with the size it had when it was verified."""
        manifest = _read_manifest(self.directory)
        if manifest is None:
            return None
        path = self.directory / manifest.file_name
        return path if _size_of(path) == manifest.size_bytes else None

    @contextmanager
    def locked(self, progress: Progress = ignore_progress) -> Iterator[None]:
        """Hold the entry alone among all processes, with an empty partial directory; wait for whoever has it.

        Raises: DownloadError when the cache directory cannot be written.
        """
        import filelock

        lock_path = cache_directory() / "locks" / f"{self.key}.lock"
        try:
            lock_path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(lock_path)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                progress("waiting for another process that fetches the same model", 0, None)
                lock.acquire()
        except OSError as error:
            raise cache_write_error(error, cache_directory(), "QUIRE_CACHE_DIR") from error
        try:
            # Whatever lies here was left by a process that was killed: it held this lock.
            shutil.rmtree(self.partial_directory, ignore_errors=True)
            try:
                self.staged_directory.mkdir(parents=True)
                yield
            except OSError as error:
                raise cache_write_error(error, cache_directory(), "QUIRE_CACHE_DIR") from error
        finally:
            shutil.rmtree(self.partial_directory, ignore_errors=True)
            lock.release()

    def publish(self, manifest: Manifest) -> Path:
        """Turn the staged directory into the entry, at once. The lock must be held."""
        manifest_path = self.staged_directory / MANIFEST
        manifest_path.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        os.replace(self.staged_directory, self.directory)
        return self.directory / manifest.file_name

    def remove(self) -> None:
        """Delete the entry; a removal that is interrupted leaves nothing that looks complete."""
        with self.locked():
            if self.directory.exists():
                os.replace(self.directory, self.staged_directory)


def cache_write_error(error: OSError, directory: Path, variable: str) -> DownloadError:
    """What to tell the user when a cache cannot be written; `variable` chooses another place for it."""
    return DownloadError(
        f"cannot write the cache in {directory}: {error.strerror or error}; free space there, or set "
        f"{variable} to another directory"
    )


def find_hub_snapshot(repository: str, revision: str) -> Path | None:
    """The files of a hub repository in the hub's cache; `revision` is a branch, tag or full commit."""
    if ".." in revision or revision.startswith("/"):
        return None
    directory = hub_cache_directory() / ("models--" + repository.replace("/", "--"))
    try:
        commit = (directory / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    snapshot = directory / "snapshots" / commit
    return snapshot if commit and "/" not in commit and _subdirectory_exists(snapshot) else None


def list_cached() -> list[CachedModel]:
    """Every model on this disk that needs no download, Quire's first, each group by name."""
    return [*_own_models(), *_hub_models()]


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
    """Delete a model by name or origin; returns what was deleted.

    Raises: ModelNotFoundError; DownloadError when the cache cannot be written.
    """
    model = find_cached(name)
    if model.origin.startswith("hub:"):
        _remove_hub_repository(model)
    else:
        CacheEntry(model.path.parent.name).remove()
    return model


def _own_models() -> Iterator[CachedModel]:
    for directory in sorted(_subdirectories(cache_directory() / "pypi")):
        manifest = _read_manifest(directory)
        if manifest is not None and CacheEntry(directory.name).find() is not None:
            yield CachedModel(manifest.name, directory / manifest.file_name, manifest.origin, manifest.size_bytes)


def _hub_models() -> Iterator[CachedModel]:
    for repository in sorted(_subdirectories(hub_cache_directory())):
        kind, _, name = repository.name.partition("--")
        snapshot = _current_snapshot(repository) if kind == "models" else None
        if snapshot is None:
            continue
        size_bytes = sum(_size_of(blob) or 0 for blob in _files(repository / "blobs"))
        if not size_bytes:
            size_bytes = sum(_size_of(path) or 0 for path in _files(snapshot))
        hub_id = name.replace("--", "/", 1)
        yield CachedModel(hub_id, snapshot, f"hub:{hub_id}@{snapshot.name}", size_bytes)


def _current_snapshot(repository: Path) -> Path | None:
    """The snapshot of `main`, else any, if it holds a model."""
    snapshots = sorted(_subdirectories(repository / "snapshots"))
    try:
        main = repository / "snapshots" / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        main = None
    for snapshot in [main] if main in snapshots else snapshots:
        if snapshot and any(path.name == "config.json" or path.suffix == ".gguf" for path in _files(snapshot)):
            return snapshot
    return None


def _remove_hub_repository(model: CachedModel) -> None:
    repository = model.path.parent.parent
    try:
        shutil.rmtree(repository)
    except OSError as error:
        raise DownloadError(f"cannot delete {repository}: {error.strerror}") from error


def _read_manifest(directory: Path) -> Manifest | None:
    try:
        manifest = Manifest(**json.loads((directory / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    texts = (manifest.name, manifest.origin, manifest.file_name)
    is_sound = all(isinstance(text, str) for text in texts) and Path(manifest.file_name).name == manifest.file_name
    return manifest if is_sound else None


def _subdirectory_exists(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []


def _files(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_file()]
    except OSError:
        return []


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
