"""The page in a real browser, on the real SmolLM2: chat, X-ray, Lab, saved traces."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.cli.tiny_directory import make_tiny_directory
from tests.page.conftest import LIMIT_MS, OpenPage, check_axe
from tests.server.serving import Serving, serving

pytestmark = pytest.mark.model
expect.set_options(timeout=LIMIT_MS)
PANES = ("Steps", "KV", "Mask", "Requests", "Roofline", "Ops", "Log")


@pytest.fixture
def server(smollm2_server: Serving) -> Serving:
    return smollm2_server


def send(page: Page, text: str, *, max_tokens: int) -> None:
    if not page.get_by_label("max_tokens").is_visible():
        page.get_by_text("Parameters").click()
    page.get_by_label("max_tokens").fill(str(max_tokens))
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def show_tokens(page: Page) -> None:
    page.get_by_role("button", name="Tokens", exact=True).click()


def ask_twice(page: Page) -> None:
    """Send two requests with one long beginning, the second when the first has its first token."""
    page.evaluate(
        """async () => {
          const ask = (question, max_tokens) => fetch("/v1/chat/completions", {method: "POST",
            headers: {"Content-Type": "application/json"}, body: JSON.stringify({stream: true, max_tokens,
            ignore_eos: true, messages: [{role: "system", content: "Answer like a pirate. ".repeat(30)},
            {role: "user", content: question}]})});
          const first = await ask("Who are you?", 300);
          await first.body.getReader().read();
          await ask("What do you eat?", 300);
        }"""
    )


def step_shown(page: Page) -> int:
    return int(re.search(r"step (\d+)", page.locator(".steps output").inner_text())[1])


def test_tokens_of_an_answer_lead_to_their_steps(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    show_tokens(page)
    send(page, "Why is the sky blue?", max_tokens=60)
    expect(page.locator(".token").nth(3)).to_be_visible()
    page.get_by_role("tab", name="KV").click()
    expect(page.locator(".block").first).to_be_visible()
    expect(page.locator(".stats").last).to_contain_text(re.compile(r"prompt \d+ tokens .* new .* tokens/s"))
    page.locator(".token").nth(5).hover()
    expect(page.locator(".token-panel")).to_contain_text(re.compile(r"id \d+, probability \d+\.\d %"))
    assert page.locator(".alternatives li").count() >= 5
    made_by = int(page.get_by_role("button", name="made by step").inner_text().split()[-1])
    page.locator(".token").nth(5).click()
    expect(page.locator(".steps output")).to_have_text(re.compile(rf"step {made_by}\b"))
    page.get_by_role("tab", name="Steps").click()
    expect(page.locator("#pane h3").first).to_have_text(f"Step {made_by}")


def test_answer_streams_until_it_is_stopped_and_a_second_turn_knows_its_text(
    server: Serving, open_page: OpenPage
) -> None:
    page = open_page(server.url)
    show_tokens(page)
    send(page, "Write a very long story about a dragon, with many chapters.", max_tokens=2000)
    expect(page.locator(".token").nth(6)).to_be_visible()
    page.get_by_role("button", name="Stop").click()  # there only while the answer is written
    expect(page.locator(".stats").last).to_contain_text("[stopped]")
    send(page, "Now say hello.", max_tokens=5)
    expect(page.locator(".stats").last).to_contain_text("[length]")
    page.get_by_text("Rendered prompt").click()
    expect(page.locator("pre").first).to_be_visible()
    expect(page.locator("pre").first).to_contain_text("Now say hello.")
    assert page.locator("pre").first.inner_text().count("assistant\n") >= 2
    page.get_by_text("Request as JSON and curl").click()
    expect(page.locator("pre").last).to_contain_text(f"curl -N {server.url}/v1/chat/completions")


def test_two_chats_with_one_prefix_share_blocks(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.get_by_role("tab", name="KV").click()
    expect(page.locator("#kv-summary")).to_contain_text("blocks of")
    ask_twice(page)
    expect(page.locator(".block.many").first).to_be_visible()
    assert page.locator(".block.many em").first.inner_text() == "×2"
    page.locator("button.owner").first.click()
    expect(page.locator("#pane table tbody tr").first.locator(".badge")).to_have_count(2)


def test_pause_holds_a_step_while_recording_goes_on(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    show_tokens(page)
    send(page, "Write a very long story about a dragon, with many chapters.", max_tokens=2000)
    expect(page.locator(".token").nth(3)).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    held = step_shown(page)
    newest = page.locator(".steps output")
    expect(newest).not_to_have_text(f"step {held} / {held}")
    assert step_shown(page) == held
    page.get_by_label("One step back").click()
    expect(newest).to_have_text(re.compile(rf"step {held - 1} /"))
    for step in (held, held + 1):
        page.locator("#gantt").press("ArrowRight")
        expect(newest).to_have_text(re.compile(rf"step {step} /"))
    page.get_by_role("button", name="Back to live").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()


def test_instructions_are_timed_before_their_pane_is_opened(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    send(page, "Tell me a story.", max_tokens=200)
    expect(page.locator(".stats")).to_contain_text("tokens/s")
    page.get_by_role("tab", name="Ops").click()
    expect(page.locator("#pane table tbody").first).to_contain_text("Gemm")
    expect(page.locator("#timed")).to_contain_text(re.compile(r"Medians of \d+ timed decode steps, steps \d+ … \d+"))
    page.get_by_label("Add up by").select_option("layer")
    expect(page.locator("#pane table tbody tr td:first-child")).to_have_text([*map(str, range(30)), "outside"])
    page.get_by_role("tab", name="Roofline").click()
    expect(page.locator("circle.measured").first).to_be_visible()
    expect(page.locator("circle.predicted").first).to_be_visible()
    expect(page.locator("#roofline text", has_text="Gemm").first).to_be_visible()
    measured_at = page.locator("#roof")
    expect(measured_at).to_contain_text(re.compile(r"at \d\d:\d\d:\d\d"))
    before = measured_at.inner_text()
    page.get_by_role("button", name="Measure again").click()
    expect(measured_at).not_to_have_text(before)


def test_way_of_a_request_has_the_parts_of_server_and_engine(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.get_by_role("tab", name="Requests").click()
    send(page, "Why is the sky blue?", max_tokens=12)
    parts = page.locator("#ways tbody tr").first
    for name in ("receive", "validate", "tokenise", "prefill", "decode", "send"):
        expect(parts).to_contain_text(name)


def test_model_of_several_ranks_shows_how_a_layer_is_cut(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(make_tiny_directory(tmp_path), "--tensor-parallel-size", "2") as server:
        page = open_page(server.url)
        expect(page.locator(".status")).to_contain_text("ready")
        page.get_by_role("tab", name="Ops").click()
        expect(page.locator("#ranks")).to_contain_text("self_attn.qkv_proj rows")
        send(page, "hello", max_tokens=20)
        expect(page.locator("#pane")).to_contain_text("Sums over 2 ranks")
        page.close()


def test_comparison_runs_beside_the_server(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    page.get_by_role("button", name="Lab", exact=True).click()
    page.get_by_role("spinbutton", name="requests").fill("12")
    page.get_by_role("spinbutton", name="rate").fill("0.5")
    page.get_by_role("button", name="Compare batching").click()
    result = page.get_by_role("region", name="Result of batching")
    expect(result.locator("table")).to_contain_text("continuous")
    expect(result).to_contain_text("requests 12")
    expect(result).to_contain_text("rate 0.5")
    expect(page.locator(".charts svg").first).to_be_visible()


def test_saved_trace_opens_offline_and_steps(server: Serving, open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(server.url)
    send(page, "Write </script><b>bold</b> in HTML.", max_tokens=20)
    expect(page.locator(".stats")).to_contain_text("tokens/s")
    for form in ("jsonl", "html"):
        with page.expect_download() as download:
            page.locator(".menu summary").click()
            page.get_by_role("button", name=f"Save .{form}").click()
        download.value.save_as(tmp_path / f"trace.{form}")
    saved = open_page(f"file://{tmp_path}/trace.html", offline=True)
    newest = step_shown(saved)
    saved.get_by_label("One step back").click()
    expect(saved.locator(".steps output")).to_have_text(re.compile(rf"step {newest - 1}\b"))
    for pane, content in (
        ("KV", ".block"),
        ("Mask", "#mask rect"),
        ("Requests", "#ways rect"),
        ("Log", ".log tr"),
        ("Steps", "#gantt .cells rect"),
    ):
        saved.get_by_role("tab", name=pane).click()
        expect(saved.locator(content).first).to_be_visible()


def test_axe_finds_nothing(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url, allowed=("501",))
    page.get_by_role("tab", name="Ops").click()
    page.get_by_label("Load").fill("8")
    page.get_by_role("button", name="Send requests").click()  # badges of all eight colours
    send(page, "Why is the sky blue?", max_tokens=30)
    expect(page.locator(".stats")).to_contain_text("tokens/s")
    page.get_by_role("button", name="Pause").click()
    check_axe(page, "the answer as text")
    show_tokens(page)
    page.locator(".token").nth(3).hover()
    for index, pane in enumerate(PANES):
        page.get_by_role("tab", name=pane).click()
        check_axe(page, pane, without="#log" if index else "template")


def test_panes_are_reached_with_the_keyboard(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url, allowed=("501",))
    page.get_by_role("tab", name="Steps").focus()
    for pane in (*PANES[1:], "Steps"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(":focus")).to_have_text(pane)
        expect(page.locator(":focus")).to_have_attribute("aria-selected", "true")
