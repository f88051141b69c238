"""The slider over all recorded steps: chat, panes and numbers are those of the chosen step."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from quire.insight.trace import replay
from tests.page.conftest import LIMIT_MS, OpenPage
from tests.page.test_page import send, step_shown
from tests.page.test_saved_trace import open_trace, recorded_trace
from tests.server.serving import Serving, serving

expect.set_options(timeout=LIMIT_MS)


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Serving]:
    with serving("smollm2", "--multi-step-decode", "1", name="smollm2") as server:
        yield server


def tell_story(page: Page) -> Locator:
    """Send a message, and return its answer when it is written."""
    send(page, "Write a long story about a dragon.", max_tokens=40)
    expect(page.locator(".stats").last).to_contain_text("tokens/s")
    return page.locator("article.assistant .markdown").last


def slide(page: Page, place: int) -> None:
    page.get_by_role("slider", name="Step").fill(str(place))


def window(page: Page) -> int:
    found = re.search(r"Timeline of (\d+) step", str(page.locator("#gantt").get_attribute("aria-label")))
    assert found is not None
    return int(found[1])


@pytest.mark.model
def test_sliding_back_unwrites_the_answer_and_takes_the_panes_along(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    answer = tell_story(page)
    whole = answer.inner_text()
    page.get_by_role("tab", name="KV").click()
    slider = page.get_by_role("slider", name="Step")
    lengths, before = [], whole
    for place in (30, 20, 10):
        slide(page, place)
        expect(page.locator("header .past")).to_have_text(re.compile(r"at step \d+"))
        expect(page.locator("#kv-summary")).not_to_contain_text(" 0 in use")
        expect(answer).not_to_have_text(before)  # the chat may be drawn after the panes
        before = answer.inner_text()
        lengths.append(len(before))
        assert whole.startswith(answer.inner_text()[:-1].rstrip())
    assert len(whole) > lengths[0] > lengths[1] > lengths[2] > 0
    shown = page.locator(".steps output")
    tenth = step_shown(page)
    slider.press("Home")
    expect(shown).not_to_have_text(re.compile(rf"step {tenth} /"))
    first = step_shown(page)
    slider.press("PageDown")
    slider.press("PageUp")
    expect(shown).not_to_have_text(re.compile(rf"step {first} /"))
    assert step_shown(page) > first
    slider.press("PageDown")
    expect(shown).to_have_text(re.compile(rf"step {first} /"))
    slider.press("End")
    expect(page.locator(".steps output")).to_have_text(re.compile(r"step (\d+) / \1"))
    slide(page, 10)
    page.get_by_role("button", name="Back to live").click()
    expect(answer).to_have_text(whole)
    expect(page.locator("header .past")).to_have_count(0)


@pytest.mark.model
def test_search_finds_the_step_that_wrote_a_word_of_the_chat(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    answer = tell_story(page)
    word = answer.inner_text().split()[-4].strip(".,")
    page.get_by_label("Find").fill(word)
    page.get_by_role("button", name="Next", exact=True).click()
    expect(page.get_by_label("Found")).to_have_text(re.compile(r"\d+ of \d+"))
    expect(page.locator("#pane table").first).to_contain_text(
        re.compile('"[^"]+"')
    )  # text, although only ids are recorded
    page.get_by_label("Find").fill("no such text")
    page.get_by_role("button", name="Next", exact=True).click()
    expect(page.get_by_label("Found")).to_have_text("not found")


def test_state_of_each_row_is_that_of_the_chosen_step(open_page: OpenPage, tmp_path: Path) -> None:
    trace = recorded_trace()
    page = open_trace(trace, open_page, tmp_path, "Steps")
    page.get_by_role("button", name="All steps").click()
    ended = {line["id"]: at for at, line in enumerate(trace.lines) if line.get("kind") == "finish"}
    steps = trace.steps
    seen = set()
    for place in range(0, len(steps), 7):
        slide(page, place)
        expect(page.locator(".steps output")).to_contain_text(f"step {steps[place]['step_id']} ")
        at = trace.lines.index(steps[place])
        waiting = replay(trace.lines[: at + 1]).waiting
        states = page.evaluate("() => [...xray.recording.known.keys()].map((id) => [id, xray.statusOf(id)])")
        for request_id, state in states:
            seen.add(state)
            if request_id in waiting:
                assert state == "waits"
            else:
                assert (state == "done") == (ended[request_id] < at), request_id
        done = page.locator("#gantt .state").all_text_contents().count("done")
        assert done == [state for _, state in states].count("done")
    assert {"", "done", "waits"} <= seen


def test_window_zooms_by_wheel_buttons_keys_and_two_fingers(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_trace(recorded_trace(), open_page, tmp_path, "Steps")
    page.get_by_role("button", name="All steps").click()
    whole = window(page)
    assert whole == page.evaluate("xray.recording.steps.length")
    page.locator(".strip svg").hover()
    page.mouse.wheel(0, -300)
    expect(page.locator("#gantt")).not_to_have_attribute("aria-label", re.compile(f"of {whole} steps"))
    by_wheel = window(page)
    assert by_wheel < whole
    page.locator("#gantt").press("+")
    by_key = window(page)
    assert by_key < by_wheel
    page.get_by_role("button", name="Zoom out").click()
    assert window(page) > by_key
    before = window(page)
    box = page.locator("#gantt").bounding_box()
    assert box is not None
    y, middle = box["y"] + 20, box["x"] + box["width"] / 2
    client = page.context.new_cdp_session(page)
    for kind, apart in (("touchStart", 60), ("touchMove", 90), ("touchMove", 140), ("touchMove", 200)):
        points = [{"x": middle - apart, "y": y, "id": 0}, {"x": middle + apart, "y": y, "id": 1}]
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    client.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert window(page) < before


def test_search_finds_requests_and_texts_of_a_trace(open_page: OpenPage, tmp_path: Path) -> None:
    trace = recorded_trace()
    page = open_trace(trace, open_page, tmp_path, "Steps")
    first = next(step for step in trace.steps if any(share["id"] == "r5" for share in step["requests"]))
    page.get_by_label("Find").fill("r5")
    page.get_by_label("Find").press("Enter")
    expect(page.locator("#pane h3").first).to_have_text(f"Step {first['step_id']}")
    page.get_by_label("Find").fill("the same beginning")
    page.get_by_label("Find").press("Enter")
    expect(page.get_by_label("Found")).to_have_text(re.compile(r"\d of \d"))


@pytest.mark.model
def test_forks_show_the_blocks_that_they_share_and_where_each_goes_on(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.get_by_role("tab", name="KV").click()
    page.get_by_role("button", name="Tokens", exact=True).click()
    send(page, "Write a long story about a dragon.", max_tokens=60)
    expect(page.locator(".stats").last).to_contain_text("tokens/s")
    page.locator(".token").nth(40).hover()
    page.locator(".alternatives li button").first.click()
    rows = page.locator(".future")
    expect(rows).to_have_count(2)
    expect(rows.nth(1).locator("em").first).to_have_text("×2")
    expect(page.locator(".stats").last).to_contain_text("tokens/s")
    tables = [rows.nth(row).locator(".block span").all_inner_texts() for row in (0, 1)]
    num_shared = rows.nth(0).locator("em").count()
    assert num_shared >= 2
    assert tables[0][:num_shared] == tables[1][:num_shared]
    assert tables[0][num_shared] != tables[1][num_shared]
    page.locator(".token").nth(40).hover()
    page.get_by_role("button", name="Fork into all 7").click()
    expect(rows.last.locator("em").first).to_have_text(re.compile(r"×(8|9)"))
