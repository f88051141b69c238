"""The page's layout on a desktop, a laptop and a phone, in both themes: sizes, places, keyboard, names of controls."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.page.conftest import LIMIT_MS, OpenPage, check_axe
from tests.page.test_page import PANES, send, show_tokens
from tests.server.serving import Serving

pytestmark = pytest.mark.model
expect.set_options(timeout=LIMIT_MS)
DESKTOP, LAPTOP, PHONE = (1440, 900), (1280, 720), (390, 844)
SIZES = [DESKTOP, LAPTOP, PHONE]
PAGE = Path(__file__).parents[2] / "src" / "quire" / "page"
TARGET = 40
"""Least height of what a finger must hit, in CSS pixels."""


@pytest.fixture
def server(smollm2_server: Serving) -> Serving:
    return smollm2_server


def open_at(open_page: OpenPage, server: Serving, size: tuple[int, int]) -> Page:
    """Open the page on a screen of this size; a phone has a touch screen."""
    width, height = size
    options: dict[str, Any] = {"has_touch": True, "is_mobile": True} if size == PHONE else {}
    page = open_page(server.url, viewport={"width": width, "height": height}, **options)
    expect(page.locator(".status")).to_contain_text("ready")
    return page


def answer(page: Page) -> None:
    """Ask for a text in several lines, which white space separates, and wait for its end."""
    page.locator(".parameters summary").click()
    page.get_by_label("temperature").fill("0")
    send(page, "Tell me three facts about the sea, as a list.", max_tokens=70)
    expect(page.locator(".stats").last).to_contain_text("tokens/s")
    page.locator(".parameters summary").click()


def fork(page: Page) -> None:
    """Let the answer fork at its 21st token, and wait for both futures."""
    page.locator(".token").nth(20).click()
    page.locator(".alternatives button").first.click()
    expect(page.locator(".split .stats").nth(1)).to_contain_text("[")


def go_to(page: Page, name: str) -> None:
    page.get_by_role("navigation").get_by_role("button", name=name).click()


def box(locator: Locator) -> dict[str, float]:
    found: dict[str, float] = locator.evaluate(
        "(e) => { const {x, y, width, height} = e.getBoundingClientRect(); return {x, y, width, height}; }"
    )
    assert found["width"] > 0
    assert found["height"] > 0
    return found


def check_fits(page: Page, state: str) -> None:
    """Check that only parts of the page scroll, and that no section leaves the screen or overlaps another."""
    found = page.evaluate(
        """() => ({
          outer: [document.documentElement.scrollWidth - innerWidth,
            document.documentElement.scrollHeight - innerHeight],
          sections: [...document.querySelectorAll("header, main > section, nav")].filter((e) => e.checkVisibility())
            .map((e) => { const r = e.getBoundingClientRect();
              return [e.tagName + e.className, r.left, r.top, r.right, r.bottom]; }),
          cut: [...document.querySelectorAll("header *, .bar *, .search *, .chat > form *")]
            .filter((e) => e.checkVisibility() && e.matches("button, input, select, summary, output"))
            .filter((e) => { const r = e.getBoundingClientRect();
              return r.left < 0 || r.right > innerWidth || e.scrollWidth > e.clientWidth + 2; })
            .map((e) => e.outerHTML),
          size: [innerWidth, innerHeight]})"""
    )
    assert found["outer"] == [0, 0], state
    assert found["cut"] == [], state
    sections = [item for item in found["sections"] if item[0] != "NAV" or found["size"][0] < 900]
    for name, left, top, right, bottom in sections:
        assert min(left, top) >= 0, (state, name)
        assert right <= found["size"][0], (state, name)
        assert bottom <= found["size"][1], (state, name)
    for i, (name, left, top, right, bottom) in enumerate(sections):
        for other, left2, top2, right2, bottom2 in sections[i + 1 :]:
            assert right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top, (state, name, other)


def check_box_is_in_sight(page: Page, state: str) -> None:
    place = box(page.get_by_label("Message", exact=True))
    assert place["y"] >= 0, state
    assert place["y"] + place["height"] <= page.evaluate("innerHeight"), state


def test_themes_differ_in_colours_alone() -> None:
    """In the dark one `check_axe` therefore looks at colours only."""
    sources = {path.name: path.read_text() for path in (*PAGE.glob("*.[chj]*"), PAGE / "icon.svg")}
    assert "light-dark(" in sources["style.css"]
    assert [name for name, text in sources.items() if "prefers-color-scheme" in text] == []


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_every_state_fits_the_screen_and_axe_finds_nothing(
    server: Serving, open_page: OpenPage, size: tuple[int, int]
) -> None:
    page = open_at(open_page, server, size)

    def check(state: str, *, has_box: bool = True, **part: str) -> None:
        check_fits(page, state)
        if has_box:
            check_box_is_in_sight(page, state)
        check_axe(page, state, **part)

    expect(page.locator(".story .caption")).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    check("story")
    answer(page)
    check("answer")
    show_tokens(page)
    page.locator(".token").nth(20).click()
    expect(page.locator(".token-panel")).to_be_visible()
    check("token", has_box=size != PHONE)
    fork(page)
    check("fork")
    page.get_by_role("button", name="Conversations", exact=True).click()
    check("conversations")
    page.get_by_role("button", name="Conversations", exact=True).click()
    go_to(page, "X-ray")
    for pane in PANES:
        page.get_by_role("tab", name=pane).click()
        if pane == "Roofline":
            expect(page.locator("#roof")).to_be_visible()
        check(pane, has_box=size != PHONE, without="#log")
    go_to(page, "Lab")
    check("Lab", has_box=size != PHONE, without="#log")


def test_no_pane_is_half_empty_on_a_desktop(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, DESKTOP)
    share = """() => { const pane = document.getElementById("pane"), outer = pane.getBoundingClientRect();
      const inner = [...pane.querySelectorAll("*")].filter((e) => e.checkVisibility())
        .map((e) => e.getBoundingClientRect());
      return [(Math.max(...inner.map((r) => r.right)) - outer.left) / outer.width,
        (Math.max(...inner.map((r) => r.bottom)) - outer.top) / outer.height]; }"""

    def check(pane: str) -> None:
        across, down = page.evaluate(share)
        assert across > 0.5, pane
        assert down > 0.5, pane

    expect(page.locator(".story")).to_be_visible()
    for second, panes in (("1", ("Steps", "KV", "Mask")), ("19", ("Steps", "KV", "Mask", "Requests", "Log"))):
        page.get_by_label("Second of the story").fill(second)
        for pane in panes:
            page.get_by_role("tab", name=pane).click()
            check(f"{pane} of the story")
    answer(page)
    show_tokens(page)
    fork(page)
    for pane in PANES:
        page.get_by_role("tab", name=pane).click()
        check(pane)


def test_xray_of_an_empty_page_follows_the_story_until_a_step_is_chosen(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, DESKTOP)
    page.get_by_label("Second of the story").fill("12")
    output = page.locator(".steps output")
    expect(output).to_have_text(re.compile(r"step (\d+) / 40"))
    early = output.inner_text()
    page.get_by_label("Second of the story").fill("15")
    expect(output).not_to_have_text(early)
    page.get_by_role("button", name="Play", exact=True).click()
    expect(page.locator(".story").get_by_role("button", name="Pause")).to_be_visible()
    page.get_by_label("One step back").click()
    expect(page.get_by_role("button", name=re.compile("Play|Replay"), exact=True)).to_be_visible()
    send(page, "Hi", max_tokens=3)
    expect(page.locator(".demo")).to_have_count(0)
    expect(output).not_to_contain_text("/ 40")


def test_block_map_has_the_rows_in_use_and_counts_the_others(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, DESKTOP)
    page.get_by_role("tab", name="KV").click()
    answer(page)
    block_map = page.locator("#map")
    expect(block_map).to_contain_text(re.compile(r"… \d+ rows of free blocks"))
    assert box(block_map)["height"] < 0.36 * box(page.locator("#pane"))["height"]
    assert block_map.locator("rect:not(.free):not([fill])").count() > 0


def test_card_of_a_token_moves_nothing_and_opens_beside_its_token(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, LAPTOP)
    show_tokens(page)
    answer(page)
    parts = [page.locator("#log"), page.locator(".chat > form"), page.locator("#pane"), page.locator(".token").nth(30)]
    before = [box(part) for part in parts]
    page.locator(".token").nth(20).hover()
    card = page.locator(".token-panel")
    expect(card).to_be_visible()
    assert [box(part) for part in parts] == before
    token, place = box(page.locator(".token").nth(20)), box(card)
    assert place["y"] in (token["y"] + token["height"], token["y"] - place["height"])
    assert place["y"] >= 0
    assert place["y"] + place["height"] <= LAPTOP[1]
    assert place["x"] >= 0
    assert place["x"] + place["width"] <= LAPTOP[0]
    page.locator("#pane").hover()
    expect(card).to_have_count(0)
    page.locator(".token").nth(20).click()
    page.locator("#pane").hover()
    page.wait_for_timeout(500)
    expect(card).to_be_visible()  # a click holds it
    page.locator("header h1").click()
    expect(card).to_have_count(0)


def test_toolbars_keep_their_places_while_an_answer_is_written(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, LAPTOP)
    answer(page)  # from now on all controls are there
    places = """() => [...document.querySelectorAll("header *, .conversation *, .bar *, .search *")]
      .filter((e) => e.checkVisibility() && e.matches("button, input, select, summary, output, .figures > span"))
      .map((e) => { const r = e.getBoundingClientRect();
        return [e.className || e.tagName, Math.round(r.x), Math.round(r.y), Math.round(r.width)]; })"""
    before = page.evaluate(places)
    assert len(before) > 20
    page.get_by_label("Message", exact=True).fill("Tell me a long story.")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".chat").get_by_role("button", name="Stop")).to_be_visible()
    assert page.evaluate(places) == before
    page.get_by_role("button", name="Pause").click()
    page.get_by_label("One step back").click()
    assert page.evaluate(places) == before
    page.get_by_role("button", name="Send requests").click()
    assert page.evaluate(places) == before
    expect(page.locator(".stats").last).to_contain_text("tokens/s")


def test_fork_at_an_earlier_step_shows_both_futures_and_the_blocks_they_share(
    server: Serving, open_page: OpenPage
) -> None:
    page = open_at(open_page, server, DESKTOP)
    show_tokens(page)
    answer(page)
    fork(page)
    expect(page.get_by_role("tab", name="KV")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("heading", name="Futures of one answer")).to_be_in_viewport()
    assert page.locator(".split article").nth(1).locator(".token").count() > 21
    cached = re.match(r"(\d+) tokens were in the prefix cache", page.locator(".split + .hint").inner_text())
    shared = re.search(r": (\d+) tokens were computed once", page.locator("#futures-summary").inner_text())
    assert cached is not None
    assert shared is not None
    assert shared[1] == cached[1]


def test_phone_has_the_chat_first_and_the_xray_as_a_page_of_its_own(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, PHONE)
    expect(page.locator(".chat")).to_be_visible()
    expect(page.locator("section.xray")).to_have_count(0)
    answer(page)
    show_tokens(page)
    expect(page.locator(".chat .tools")).to_contain_text("Tap a token")
    whole = page.locator(".token").count()
    page.locator(".token").nth(20).tap()
    assert page.locator(".token").count() == whole  # the X-ray is out of sight: its step does not cut the answer
    token, card = box(page.locator(".token").nth(20)), box(page.locator(".token-panel"))
    assert 0 <= token["y"] <= token["y"] + token["height"] <= card["y"]
    page.get_by_role("button", name="made by step").tap()
    expect(page.locator(".chat")).to_be_hidden()
    expect(page.locator("section.xray")).to_be_visible()
    page.get_by_role("tab", name="Steps").tap()
    expect(page.locator("#pane .about")).to_contain_text("Tap a step")
    for words in ("Click", "Point at", "on the right", "Ctrl", "Beside"):
        expect(page.locator("body")).not_to_contain_text(words)
    go_to(page, "Chat")
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


def test_targets_of_a_phone_are_high_enough_for_a_finger(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, PHONE)
    small = f"""() => [...document.querySelectorAll(
      "button, select, textarea, summary, input, .file, label:has([type=checkbox])")]
      .filter((e) => e.checkVisibility() && !e.matches("[type=checkbox], .file *")
        && e.getBoundingClientRect().height < {TARGET})
      .map((e) => e.outerHTML)"""
    expect(page.locator(".story")).to_be_visible()
    assert page.evaluate(small) == []
    answer(page)
    show_tokens(page)
    page.locator(".token").nth(20).tap()
    expect(page.locator(".alternatives button").first).to_be_visible()
    assert page.evaluate(small) == []
    page.get_by_role("button", name="Conversations", exact=True).tap()
    assert page.evaluate(small) == []
    go_to(page, "X-ray")
    for pane in PANES:
        page.get_by_role("tab", name=pane).tap()
        assert page.evaluate(small) == [], pane
    go_to(page, "Lab")
    assert page.evaluate(small) == []


def test_escape_closes_what_is_open_and_the_focus_goes_back(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, DESKTOP)
    show_tokens(page)
    answer(page)
    token = page.locator(".token").nth(3)
    token.focus()
    expect(page.locator(".token-panel")).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.token-panel') !== null")
    page.keyboard.press("Escape")
    expect(page.locator(".token-panel")).to_have_count(0)
    expect(token).to_be_focused()
    button = page.get_by_role("button", name="Conversations", exact=True)
    button.press("Enter")
    page.get_by_label("Search conversations").press("Escape")
    expect(page.get_by_role("region", name="Conversations")).to_have_count(0)
    expect(button).to_be_focused()
    menu = page.locator(".menu summary")
    menu.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Save .jsonl")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Save .jsonl")).to_be_hidden()
    expect(menu).to_be_focused()


def test_tab_key_goes_from_chat_to_xray_and_shows_where_it_is(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, DESKTOP)
    answer(page)
    order = {"HEADER": 0, "chat": 1, "xray": 2}
    visited = []
    page.locator("header h1").click()  # the next control is the first behind it
    for _ in range(60):
        page.keyboard.press("Tab")
        found = page.evaluate(
            """() => { const e = document.activeElement, s = e.closest("header, section");
              return s && [s.className || s.tagName,
                getComputedStyle(e).outlineStyle !== "none" || e.matches(".strip input")]; }"""
        )
        if found is None:
            break
        assert found[1], page.evaluate("document.activeElement.outerHTML")
        visited.append(order[found[0]])
    assert visited == sorted(visited)
    assert set(visited) == {0, 1, 2}


def test_tokens_of_white_space_have_names(server: Serving, open_page: OpenPage) -> None:
    page = open_at(open_page, server, DESKTOP)
    show_tokens(page)
    answer(page)
    names = page.locator(".token").evaluate_all(
        "(all) => all.map((e) => [e.textContent, e.getAttribute('aria-label')])"
    )
    blank = [name for text, name in names if not text.strip()]
    assert blank
    assert all(name.startswith("white space") for name in blank)
