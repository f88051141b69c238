"""Conversations that the page keeps in the browser, on a tiny model: reload, list, files, two tabs, no storage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import LIMIT_MS, OpenPage, check_axe
from tests.server.serving import Serving

expect.set_options(timeout=LIMIT_MS)
FORBIDDEN = """for (const name of ["indexedDB", "localStorage", "sessionStorage"])
  Object.defineProperty(window, name, {get() { throw new DOMException("no", "SecurityError"); }});"""


@pytest.fixture
def server(tiny_server: Serving) -> Serving:
    return tiny_server


def ask(page: Page, text: str, *, max_tokens: int = 6) -> None:
    """Send a message, wait for the whole answer, and save it."""
    if not page.get_by_label("max_tokens").is_visible():
        page.get_by_text("Parameters").click()
    page.get_by_label("max_tokens").fill(str(max_tokens))
    page.get_by_label("temperature").fill("0")
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".stats").last).to_contain_text("[")
    save(page)


def save(page: Page) -> None:
    """Save the conversation now, as a page does that is hidden, and wait until it is saved."""
    page.evaluate("import('/page/app.js').then(({ chat }) => chat.conversations.flush())")


def wait_until_saved(page: Page) -> None:
    """Wait until the page has saved its conversation by itself, which it does soon after a change."""
    page.evaluate(
        """async () => {
          const { conversations } = (await import("/page/app.js")).chat;
          while (conversations.timer || !conversations.current.revision) await new Promise(requestAnimationFrame);
          await conversations.queue;
        }"""
    )


def listed(page: Page) -> list[str]:
    if page.get_by_role("button", name="Conversations", exact=True).get_attribute("aria-expanded") == "false":
        page.get_by_role("button", name="Conversations", exact=True).click()
    return [text.split("\n")[0] for text in page.locator(".conversations .open").all_inner_texts()]


def shown(page: Page) -> list[str]:
    return page.locator("#log .text, #log .markdown, #log .stats").all_inner_texts()


def test_reload_keeps_tree_branch_parameters_and_draft(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.get_by_role("button", name="Tokens", exact=True).click()
    ask(page, "First question", max_tokens=12)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".stats").last).to_contain_text("[")
    page.get_by_role("button", name="Branch before").click()
    page.get_by_label("system message").fill("Be brief")
    page.get_by_label("Message", exact=True).fill("half a thou")
    wait_until_saved(page)
    before = shown(page)
    page.reload()
    expect(page.locator(".branches")).to_contain_text("1 of 2")
    assert shown(page) == before
    assert page.get_by_label("Message", exact=True).input_value() == "half a thou"
    page.get_by_text("Parameters").click()
    assert page.get_by_label("max_tokens").input_value() == "12"
    assert page.get_by_label("system message").input_value() == "Be brief"
    page.locator(".token").nth(3).hover()
    expect(page.locator(".alternatives li").nth(7)).to_be_visible()
    page.locator(".alternatives li button").nth(0).click()
    expect(page.locator(".split article")).to_have_count(3)
    expect(page.locator(".split .stats").nth(2)).to_contain_text("[")


def test_list_names_searches_renames_and_deletes_after_asking(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    ask(page, "Tell me of lighthouses")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#log article")).to_have_count(0)
    ask(page, "How is bread made?")
    assert listed(page) == ["How is bread made?", "Tell me of lighthouses"]
    page.get_by_label("Search conversations").fill("LIGHTH")
    expect(page.locator(".conversations .open")).to_have_count(1)
    page.locator(".conversations .open").click()
    expect(page.locator("article.user .text")).to_have_text("Tell me of lighthouses")
    page.get_by_role("button", name="Rename Tell me").click()
    page.get_by_label("Name", exact=True).fill("<b>Towers</b>")
    page.get_by_label("Name", exact=True).press("Enter")
    expect(page.locator(".conversation .name")).to_have_text("<b>Towers</b>")
    page.get_by_label("Search conversations").fill("")
    page.get_by_role("button", name="Delete How is").click()
    page.get_by_role("button", name="Keep").click()
    expect(page.locator(".conversations .open")).to_have_count(2)
    page.get_by_role("button", name="Delete How is").click()
    page.get_by_role("button", name="Delete for good").click()
    expect(page.get_by_role("button", name="Delete for good")).to_have_count(0)  # its row counts for none until then
    expect(page.locator(".conversations .open")).to_have_count(1)
    page.reload()
    expect(page.locator(".conversation .name")).to_have_text("<b>Towers</b>")
    assert listed(page) == ["<b>Towers</b>"]


def test_axe_finds_nothing_in_list_and_form(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    ask(page, "Name me")
    listed(page)
    page.get_by_role("button", name="Rename Name me").click()
    check_axe(page, "conversations", within=".chat")


def test_exported_file_is_imported_with_its_answers(server: Serving, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(server.url)
    ask(page, "Keep me")
    answer = shown(page)
    listed(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export Keep me").click()
    file = tmp_path / "one.json"
    download.value.save_as(file)
    other = open_page(server.url)
    listed(other)
    other.get_by_label("Import conversations").set_input_files(file)
    expect(other.locator("article.user .text")).to_have_text("Keep me")
    assert shown(other) == answer
    assert listed(other) == ["Keep me"]


def test_file_that_is_none_of_ours_is_refused_with_its_reason(
    server: Serving, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(server.url)
    ask(page, "<img src=x onerror=alert(1)>")
    listed(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    good = json.loads(Path(download.value.path()).read_text())

    def changed(change: Callable[[dict], object]) -> str:
        file = json.loads(json.dumps(good))
        change(file)
        return json.dumps(file)

    node = lambda file: file["conversations"][0]["nodes"][1]  # noqa: E731
    for text, reason in (
        ("{", "it is no JSON"),
        ('{"messages": []}', "no file of conversations"),
        (changed(lambda file: file.update(version=2)), "a newer Quire wrote it"),
        (changed(lambda file: node(file).update(content=["x"])), "nodes[1].content is not text"),
        (changed(lambda file: node(file).update(parent="nowhere")), "nodes[1].parent is not the key"),
        (changed(lambda file: node(file)["tokens"]["ids"].pop()), "nodes[1].tokens is not a table"),
    ):
        file = tmp_path / "file.json"
        file.write_text(text)
        page.get_by_label("Import conversations").set_input_files(file)
        expect(page.locator(".conversations [role=alert]")).to_contain_text(reason)
    assert len(listed(page)) == 1
    evil = changed(lambda file: file["conversations"][0].update(name="<script>alert(1)</script>", isNamed=True))
    file.write_text(evil)
    page.get_by_label("Import conversations").set_input_files(file)
    expect(page.locator(".conversation .name")).to_have_text("<script>alert(1)</script>")
    assert page.locator(".chat script, .chat img").count() == 0


def test_two_tabs_on_one_conversation_lose_nothing(server: Serving, open_page: OpenPage) -> None:
    first = open_page(server.url)
    ask(first, "One")
    second = first.context.new_page()
    second.goto(server.url)
    listed(second)
    second.locator(".conversations .open").first.click()
    expect(second.locator("article.user .text")).to_have_text("One")
    ask(second, "Two, of the second tab")
    expect(first.locator("article.user .text").last).to_have_text("Two, of the second tab")
    expect(first.get_by_text("Changed in another tab")).to_be_visible()
    # The first tab does not hear of the next message: it must not write over it.
    first.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    second.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    ask(second, "Three, of the second tab")
    first.bring_to_front()  # a tab behind another one draws once a second
    first.locator("article.user").last.get_by_role("button", name="Edit").click()
    first.get_by_label("Edited message").fill("Three, of the first tab")
    first.locator("article.user form").get_by_role("button", name="Send").click()
    expect(first.get_by_text("both versions are kept")).to_be_visible()
    first.reload()
    expect(first.locator("article.user .text").last).to_have_text("Three, of the first tab")
    first.get_by_role("button", name="Branch before").click()
    expect(first.locator("article.user .text").last).to_have_text("Three, of the second tab")


def test_conversations_stay_in_memory_where_storage_is_forbidden(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.add_init_script(FORBIDDEN)
    page.reload()
    ask(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("The browser allows this page no storage")
    page.get_by_role("button", name="New conversation").click()
    ask(page, "Again")
    assert listed(page) == ["Again", "Hello"]
    page.locator(".conversations .open").last.click()
    expect(page.locator("article.user .text")).to_have_text("Hello")
    page.close()  # with the script


def test_conversation_goes_on_while_storage_is_full(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    client = page.context.new_cdp_session(page)
    client.send("Storage.overrideQuotaForOrigin", {"origin": server.url, "quotaSize": 1})
    ask(page, "word " * 300)
    expect(page.get_by_role("alert")).to_contain_text("storage is full")
    ask(page, "still here")
    assert page.locator("article.user").count() == 2
    client.send("Storage.overrideQuotaForOrigin", {"origin": server.url})
    ask(page, "saved now")
    expect(page.get_by_role("alert")).to_have_count(0)
    page.reload()
    expect(page.locator("article.user")).to_have_count(3)
    page.close()  # with the quota
