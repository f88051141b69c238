"""The page's files and the commands behind its Lab; tests/page drives the page itself."""

import asyncio
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from quire.server.keys import KeyRing
from quire.server.routes import page
from tests.server.fake_engine import in_loop
from tests.server.served import serving

KEY = "a-key"
FOLDER = Path(page.__file__).parents[2] / "page"
PRINTS = "import json, os, sys; print(json.dumps({'given': sys.argv[3:], 'has_key': 'QUIRE_API_KEY' in os.environ}))"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands in for the Python that runs `quire`: a script that a test writes. It gets "-m quire" first."""
    script, runner = tmp_path / "script.py", tmp_path / "python"
    runner.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    runner.chmod(0o755)
    monkeypatch.setattr(page.sys, "executable", str(runner))
    script.write_text(PRINTS)
    return script


@in_loop
async def test_files_of_the_page_need_no_key_and_may_load_nothing_from_elsewhere() -> None:
    async with serving(keys=KeyRing({KEY: "ci"})) as server:
        script = "text/javascript"
        for path, media_type in (("/", "text/html"), ("/page/app.js", script), ("/page/vendor/preact.js", script)):
            answer = await server.answer("GET", path)
            assert answer.status == 200
            assert answer.headers["content-type"].startswith(media_type)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            again = await server.answer("GET", path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status, again.body) == (304, b"")


@in_loop
async def test_only_files_of_the_page_are_served() -> None:
    async with serving() as server:
        for path in ("/page/", "/page/nothing.js", "/page/../events.py", "/page/%2e%2e/events.py", "/page/vendor",
                     "/page//etc/passwd"):  # fmt: skip
            assert (await server.answer("GET", path)).status == 404, path


def test_every_module_of_the_page_is_fetched_at_once() -> None:
    """A module that the first lines do not name is fetched only when another one that imports it has come."""
    index = (FOLDER / "index.html").read_text()
    named = re.findall(r'rel="modulepreload" href="/page/([^"]+)"', index)
    imported = {found for path in FOLDER.glob("*.js") for found in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert sorted(named) == sorted(imported)


def test_page_shows_its_name_before_a_script_runs() -> None:
    body = (FOLDER / "index.html").read_text().partition("<body>")[2]
    assert "<h1>Quire</h1>" in body


def test_page_names_no_address_of_another_machine() -> None:
    for path in FOLDER.glob("*.*"):
        addresses = re.findall(r"https?://[^\s\"'`)]+", path.read_text())
        assert [item for item in addresses if not item.startswith("http://www.w3.org/")] == [], path.name


@in_loop
async def test_comparison_gets_its_settings_and_no_key(command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    async with serving() as server:
        answer = await server.answer("POST", "/lab/compare", body={"name": "kv", "settings": {"seed": 3, "slots": 4}})
        given = ["compare", "kv", "--json", "--quiet", "--seed", "3", "--slots", "4"]
        assert answer.json == {"given": given, "has_key": False}


@in_loop
async def test_comparison_runs_the_served_model_if_asked(command: Path) -> None:
    async with serving() as server:
        settings = {"model": "served", "rate": 2.5, "pool": 1 << 20}
        given = (await server.answer("POST", "/lab/compare", body={"name": "kv", "settings": settings})).json["given"]
        model = server.app.state.quire.engines.options.model
        assert given[4:] == ["--model", model, "--rate", "2.5", "--pool", str(1 << 20)]


@pytest.mark.parametrize(
    "body",
    [{"name": "rm"}, {"name": "kv", "settings": {"html": 1}}, {"name": "kv", "settings": {"seed": "1; ls"}},
     {"name": "kv", "settings": {"seed": -1}}, {"name": "kv", "settings": {"model": "/etc/passwd"}},
     {"name": "kv", "other": 1}, {}],
)  # fmt: skip
@in_loop
async def test_unknown_comparison_or_setting_runs_nothing(command: Path, body: object) -> None:
    command.write_text("raise SystemExit('it ran')")
    async with serving() as server:
        assert (await server.answer("POST", "/lab/compare", body=body)).status == 400


@in_loop
async def test_comparison_is_what_the_system_ends_first(command: Path) -> None:
    command.write_text(
        "import json, time\nend = time.monotonic() + 30\n"
        "while (score := open('/proc/self/oom_score_adj').read().strip()) != '1000' and time.monotonic() < end:\n"
        "    time.sleep(0.01)\nprint(json.dumps({'score': score}))"
    )
    async with serving() as server:
        assert (await server.answer("POST", "/lab/compare", body={"name": "kv"})).json == {"score": "1000"}


@in_loop
async def test_failed_command_is_an_error_with_its_message(command: Path) -> None:
    command.write_text("import sys; sys.exit('error[usage]: no such command')")
    async with serving() as server:
        answer = await server.answer("POST", "/lab/compare", body={"name": "kv"})
        assert (answer.status, answer.code) == (501, "command_failed")
        assert "no such command" in answer.json["error"]["message"]


@in_loop
async def test_prediction_is_made_once_and_again_if_asked(command: Path) -> None:
    async with serving() as server:
        first = await server.answer("GET", "/xray/explain")
        assert first.json["given"][0] == "explain"
        assert abs(int(first.headers["x-measured-at"]) - time.time()) < 600
        command.write_text("raise SystemExit('it ran again')")
        second = await server.answer("GET", "/xray/explain")
        assert second.json == first.json
        assert second.headers["x-measured-at"] == first.headers["x-measured-at"]
        assert (await server.answer("GET", "/xray/explain?again=1")).status == 501
    async with serving(keys=KeyRing({KEY: "ci"})) as server:
        refused = await server.answer("GET", "/xray/explain?again=1", headers={"Authorization": f"Bearer {KEY}"})
        assert (refused.status, refused.code) == (403, "not_admin"), "others get what it measures"


@in_loop
async def test_ranks_are_drawn_for_a_model_that_has_several(command: Path) -> None:
    async with serving() as server:
        refused = await server.answer("GET", "/xray/ranks")
        assert (refused.status, refused.code) == (404, "single_rank")
        supervisor = server.app.state.quire.engines
        supervisor.options = replace(supervisor.options, tensor_parallel_size=3)
        given = (await server.answer("GET", "/xray/ranks")).json["given"]
        assert given == ["view", "ranks", supervisor.options.model, "--tp", "3", "--json", "--quiet"]


@in_loop
async def test_second_comparison_is_refused_and_the_first_ends_with_its_client(command: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command.write_text(
        f"import os, pathlib, time\nnew = pathlib.Path({str(note) + '.new'!r})\nnew.write_text(str(os.getpid()))\n"
        f"new.rename({str(note)!r})\ntime.sleep(60)"
    )
    async with serving() as server:
        first = asyncio.create_task(server.answer("POST", "/lab/compare", body={"name": "kv"}))
        while not note.exists():
            await asyncio.sleep(0.01)
        assert (await server.answer("POST", "/lab/compare", body={"name": "kv"})).code == "lab_busy"
        first.cancel()
        while psutil.pid_exists(int(note.read_text())):
            await asyncio.sleep(0.01)
