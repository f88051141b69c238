"""Notes of running servers."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from quire.server.registration import ServerNote, directory, find, registered
from tests.hostile_files import HOSTILE


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_server_is_found_while_it_runs() -> None:
    assert find() == []
    with registered("http://127.0.0.1:1", "tiny"):
        (note,) = find()
        assert (note.pid, note.url, note.model) == (os.getpid(), "http://127.0.0.1:1", "tiny")
        assert find() == [note]
    assert find() == []
    assert list(directory().iterdir()) == []


def note_of(pid: int) -> ServerNote:
    with registered("http://127.0.0.1:1", "tiny"):
        (note,) = find()
    return msgspec.structs.replace(note, pid=pid, started_s=psutil.Process(pid).create_time())


def put(name: str, note: ServerNote | str) -> Path:
    path = directory() / name
    path.write_text(note if isinstance(note, str) else msgspec.json.encode(note).decode())
    return path


def test_notes_of_killed_servers_are_removed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note = note_of(process.pid)
    path = put("gone.json", note)
    assert find() == [note]
    process.communicate()
    assert find() == []
    assert not path.exists()


def test_process_with_a_reused_id_is_not_the_server() -> None:
    mine = note_of(os.getpid())
    path = put("old.json", msgspec.structs.replace(mine, started_s=mine.started_s - 1000))
    assert find() == []
    assert not path.exists()


def test_notes_of_other_machines_and_other_files_are_left_alone() -> None:
    mine = note_of(os.getpid())
    kept = [
        put("there.json", msgspec.structs.replace(mine, host="elsewhere", started_s=0.0)),
        put("text.json", "hello"),
        put("list.json", "[]"),
        put("half.json", '{"pid": 1}'),
        put("number.json", json.dumps({**msgspec.structs.asdict(mine), "pid": "1"})),
    ]
    assert find() == []
    assert all(path.exists() for path in kept)


def test_server_runs_without_a_writable_directory(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    (state / "quire").write_text("a file")
    with caplog.at_level(logging.INFO, "quire.server"), registered("http://127.0.0.1:1", "tiny"):
        assert find() == []
    assert "quire ps will not know this server" in caplog.text


def test_note_that_another_user_may_have_made_is_not_read() -> None:
    note = note_of(os.getpid())
    for spoil in HOSTILE.values():
        spoil(put("other.json", note))
        assert find() == []
        (directory() / "other.json").unlink()
