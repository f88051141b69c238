"""The live view of two keys on a server without `--xray-text`: own answers have their text, others are counts."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.cli.tiny_directory import make_tiny_directory
from tests.page.conftest import LIMIT_MS, OpenPage
from tests.page.test_conversations import ask
from tests.server.serving import CHAT, Serving, serving

expect.set_options(timeout=LIMIT_MS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("model")
    model, keys = make_tiny_directory(folder, max_position_embeddings=512), folder / "keys"
    keys.write_text("ann:key-a\nbob:key-b\n")
    keys.chmod(0o600)
    with serving(model, "--api-key-file", str(keys), "--multi-step-decode", "1") as server:
        yield server


@pytest.fixture
def page(server: Serving, open_page: OpenPage) -> Page:
    """Return the page of ann, with an answer; it has seen a request of bob."""
    page = open_page(server.url, allowed=("401",))
    page.get_by_label("API key").fill("key-a")
    page.get_by_role("button", name="Use the key").click()
    expect(page.locator(".status")).to_contain_text("ready")
    body = {**CHAT, "max_tokens": 6, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key-b", "X-Request-Id": "chosen-by-bob"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=60).read()
    expect(page.locator(".steps output")).to_have_text(re.compile(r"step \d+ / \d+"))
    expect(page.locator("#pane tbody td:last-child code").first).to_have_text("·")
    expect(page.locator("#pane")).to_contain_text("A dot is a token whose text stays in the engine")
    ask(page, "Hello", max_tokens=8)
    expect(page.locator(".stats")).to_contain_text("8 new")
    return page


def saved(page: Page, path: Path, *names: str) -> list[dict[str, Any]]:
    """Return the lines of a file that a button makes."""
    page.locator(".menu summary").click()
    for name in names[:-1]:
        page.get_by_role("button", name=name).click()
    with page.expect_download() as download:
        page.get_by_role("button", name=names[-1]).click()
    download.value.save_as(path)
    text = path.read_text()
    assert "chosen-by-bob" not in text
    return [json.loads(row) for row in text.splitlines() if re.match(r'\{"(t|quire_trace)":', row)]


def test_own_tokens_have_the_text_of_the_chat_in_every_pane(page: Page) -> None:
    expect(page.locator("article.assistant h3 .badge")).to_have_text("B")
    page.get_by_role("button", name="Tokens", exact=True).click()
    shown = page.locator(".token").nth(3).inner_text()
    page.locator(".token").nth(3).click()
    expect(page.locator("#pane tbody td:last-child code")).to_have_text(json.dumps(shown, ensure_ascii=False))
    page.get_by_label("Find").fill(shown)
    page.get_by_label("Find").press("Enter")
    expect(page.locator(".search")).to_contain_text(re.compile(r"\d of \d"))


def test_files_without_text_have_neither_tokens_nor_ids_of_requests(page: Page, tmp_path: Path) -> None:
    for names in (("Share…", "Without text"), ("Save .jsonl",)):
        lines = saved(page, tmp_path / "saved", *names)
        shares = [share for line in lines if line.get("kind") == "step" for share in line["requests"]]
        assert sum(len(share["new"]) for share in shares) == 14
        assert {token for share in shares for token in share["new"]} == {None}
        assert all(share["text"] is None for share in shares)
        ids = {share["id"] for share in shares}
        assert len(ids) == 2
        assert ids == {"A", "B"} or {re.sub(r"\d+|-.*", "", name) for name in ids} == {"r", "req"}


def test_shared_file_with_text_has_the_own_answer_only(page: Page, tmp_path: Path) -> None:
    lines = saved(page, tmp_path / "saved", "Share…", "With text")
    texts: dict[str, list[str]] = {}
    for line in lines:
        for share in line["requests"] if line.get("kind") == "step" else ():
            texts.setdefault(share["id"], []).extend(share["text"] or ())
    page.get_by_role("button", name="Tokens", exact=True).click()
    expect(page.locator(".token")).to_have_count(8)
    assert texts == {"A": [], "B": page.locator(".token").all_text_contents()}


def test_tokens_before_the_first_line_of_a_recording_keep_their_places(server: Serving, open_page: OpenPage) -> None:
    place = open_page(server.url, allowed=("401",)).evaluate(
        """async () => {
          const recording = new (await import("/page/recording.js")).Recording();
          const request = {id: "a", num_prompt_tokens: 5, num_computed: 7, num_tokens: 8, tables: [[1]]};
          const engine = {windows: [null]};
          recording.add({quire_trace: 1, t: 0, engine, requests: [request], cached: [], num_waiting: 0});
          const share = {id: "a", start: 7, count: 1, drafts: 0, new: [null], tables: [[1, []]]};
          recording.add({kind: "step", id: "", t: 1, step_id: 9, duration_s: 1, requests: [share], new_requests: []});
          return recording.placeOf("a", {step_id: 9});
        }"""
    )
    assert place == 3
