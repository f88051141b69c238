"""Stories of the empty page and of shared files, and files that are no recording."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from quire.engine.chat import dialogue_of
from quire.engine.llm_engine import LLMEngine
from quire.insight.trace import EngineTrace, page_template, to_html
from quire_lessons.story import OPTIONS, SHIPPED, SHIPPED_PROMPT, record_story
from tests.cli.command_line import call
from tests.page.conftest import LIMIT_MS, OpenPage
from tests.page.test_page import send
from tests.server.serving import Serving, serving

expect.set_options(timeout=LIMIT_MS)
MAX_STORY_BYTES = 60_000
SCENES = ("becomes", "block", "Prefill", "Decode", "Fork")


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Serving]:
    with serving("smollm2", "--block-size", "16", name="smollm2") as server:
        yield server


def open_story(open_page: OpenPage, folder: Path, trace: EngineTrace, **options: object) -> Page:
    (folder / "story.html").write_text(to_html(trace))
    return open_page(f"file://{folder}/story.html", offline=True, **options)


def second(page: Page) -> float:
    return float(page.get_by_label("Second of the story").input_value())


def seek(page: Page, to: float) -> None:
    page.get_by_label("Second of the story").fill(str(to))


def test_shipped_story_plays_from_tokens_to_a_fork_in_20_seconds(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_story(open_page, tmp_path, EngineTrace.read(SHIPPED))
    caption = page.locator(".caption")
    expect(caption).to_contain_text("The prompt becomes 36 tokens")
    assert page.get_by_label("Second of the story").get_attribute("max") == "20"
    expect(page.locator(".story .pieces")).to_contain_text("␣blue")  # it plays by itself
    page.get_by_role("button", name="Pause").click()
    held = second(page)
    page.wait_for_timeout(400)
    assert second(page) == held
    for at, scene in zip((2, 5, 9, 14, 19), SCENES, strict=True):
        seek(page, at)
        expect(caption).to_contain_text(scene)
    texts = page.locator(".futures p")
    expect(texts).to_have_count(2)
    assert texts.nth(0).inner_text() != texts.nth(1).inner_text()
    tables = [page.locator(".story .blocks").nth(row).locator(".block") for row in (0, 1)]
    shared = [table.locator("em").count() for table in tables]
    assert shared == [2, 2]
    assert tables[0].nth(0).inner_text() == tables[1].nth(0).inner_text()
    assert tables[0].last.inner_text() != tables[1].last.inner_text()
    seek(page, 20)
    page.get_by_role("button", name="Replay").click()
    expect(caption).to_contain_text(SCENES[0])
    page.get_by_role("button", name="All steps and panes").click()
    expect(page.get_by_role("tab", name="KV")).to_be_visible()


def test_answer_is_written_word_by_word_in_the_scene_of_decodes(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_story(open_page, tmp_path, EngineTrace.read(SHIPPED))
    lengths = []
    for at in (10.5, 12, 13.5):
        seek(page, at)
        lengths.append(len(page.locator(".futures p").first.inner_text()))
    assert lengths == sorted(set(lengths))


def test_story_stands_still_for_readers_who_want_no_motion(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_story(open_page, tmp_path, EngineTrace.read(SHIPPED), reduced_motion="reduce")
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    expect(page.locator(".story .piece")).to_have_count(36)  # the first scene, whole
    for scene in SCENES[1:]:
        page.get_by_role("button", name="Next scene").click()
        expect(page.locator(".caption")).to_contain_text(scene)


def test_page_that_is_shipped_is_small() -> None:
    assert SHIPPED.stat().st_size <= MAX_STORY_BYTES
    files = [path for path in SHIPPED.parent.rglob("*") if path.is_file() and path != SHIPPED]
    assert sum(path.stat().st_size for path in files) <= 400_000


@pytest.mark.model
def test_shipped_story_is_what_its_command_records(smollm2_path: Path) -> None:
    engine = LLMEngine.from_options(max_model_len=512, num_blocks_override=49, **OPTIONS)
    try:
        found = record_story(engine, dialogue_of(engine).message_ids(SHIPPED_PROMPT))
    finally:
        engine.shutdown()
    shipped = EngineTrace.read(SHIPPED)
    shapes = [
        [(line.get("kind"), line.get("id"), line.get("num_tokens"), line.get("block_ids")) for line in trace.lines]
        for trace in (found, shipped)
    ]
    assert shapes[0] == shapes[1]
    assert found.lines[1] | {"t": 0} == shipped.lines[1] | {"t": 0}


@pytest.mark.model
def test_tour_writes_a_page_that_plays_its_prompt(smollm2_path: Path, open_page: OpenPage, tmp_path: Path) -> None:
    done = call("tour", "smollm2", "What is bread made of?", "--html", str(tmp_path / "tour.html"))
    assert done.exit_code == 0, done.output
    page = open_page(f"file://{tmp_path}/tour.html", offline=True)
    expect(page.locator(".story .pieces")).to_contain_text("␣bread")
    seek(page, 19)
    expect(page.locator(".caption")).to_contain_text("Both share")


@pytest.mark.model
def test_empty_page_plays_the_story_until_a_message_is_sent(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    expect(page.locator(".chat .story .caption")).to_contain_text(SCENES[0])
    seek(page, 19)
    expect(page.locator(".chat .story .caption")).to_contain_text("Fork")
    send(page, "Hi", max_tokens=4)
    expect(page.locator(".story")).to_have_count(0)


@pytest.mark.model
def test_story_that_could_not_be_fetched_is_fetched_again(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url, allowed=("ERR_FAILED",))
    page.route("**/page/story.jsonl", lambda route: route.abort())
    page.reload()
    expect(page.locator(".status")).to_contain_text("ready")
    expect(page.locator(".story")).to_have_count(0)
    page.unroute_all()
    page.get_by_role("button", name="Tokens", exact=True).click()
    expect(page.locator(".story .caption")).to_be_visible()


@pytest.mark.model
@pytest.mark.parametrize("with_text", [True, False])
def test_shared_file_opens_on_its_prompt_and_has_text_only_if_allowed(
    server: Serving, open_page: OpenPage, tmp_path: Path, with_text: bool
) -> None:
    page = open_page(server.url)
    send(page, "Tell me about the ocean.", max_tokens=24)
    expect(page.locator(".stats").last).to_contain_text("tokens/s")
    answer = page.locator("article.assistant .markdown").last.inner_text()
    page.locator(".menu summary").click()
    page.get_by_role("button", name="Share…").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="With text" if with_text else "Without text").click()
    download.value.save_as(tmp_path / "story.html")
    content = (tmp_path / "story.html").read_text()
    assert (" ocean" in content) == with_text
    saved = open_page(f"file://{tmp_path}/story.html", offline=True)
    expect(saved.locator(".caption")).to_contain_text(SCENES[0])
    seek(saved, 14)
    expect(saved.locator(".caption")).to_contain_text("Decode")
    shown = re.sub(r"\s", "", saved.locator(".futures p").first.inner_text())
    assert (re.sub(r"\s", "", answer)[:12] in shown) == with_text


def test_file_that_is_no_recording_or_too_new_is_named(open_page: OpenPage, tmp_path: Path) -> None:
    (tmp_path / "trace.html").write_text(page_template())
    page = open_page(f"file://{tmp_path}/trace.html", offline=True)
    for text, said in (
        ("hello", "no recording of Quire"),
        ("", "It is empty"),
        ('{"kind": "step"}', "no recording of Quire"),
        ("[1]", "no recording of Quire"),
        ("null", "no recording of Quire"),
        (json.dumps({"quire_trace": 99}), "trace format 99, this page reads up to 1: open it with a newer Quire"),
    ):
        (tmp_path / "other.jsonl").write_text(text)
        page.get_by_label("Open another recording").set_input_files(tmp_path / "other.jsonl")
        expect(page.get_by_role("alert")).to_contain_text(said)
        page.get_by_label("Open another recording").set_input_files(SHIPPED)
        expect(page.locator(".caption")).to_contain_text(SCENES[0])
        expect(page.get_by_role("alert")).to_have_count(0)
