"""The page's chat in a real browser, on the real SmolLM2: branches, forks, Markdown, messages that fail."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import LIMIT_MS, OpenPage
from tests.page.test_page import send, show_tokens
from tests.server.serving import Serving

pytestmark = pytest.mark.model
expect.set_options(timeout=LIMIT_MS)


@pytest.fixture
def server(smollm2_server: Serving) -> Serving:
    return smollm2_server


def answer_greedily(page: Page, text: str, *, max_tokens: int) -> None:
    """Ask, and wait for the end of the answer."""
    send(page, text, max_tokens=max_tokens)
    page.get_by_label("temperature").fill("0")
    expect(page.locator(".stats").last).to_contain_text("[")


def tokens_of(page: Page, article: int) -> list[str]:
    return page.locator("article.assistant").nth(article).locator(".token").all_inner_texts()


def test_answer_forks_at_a_token_and_both_futures_are_shown(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    show_tokens(page)
    answer_greedily(page, "Name the planets and tell me about each of them.", max_tokens=60)
    page.locator(".token").nth(40).hover()
    other = page.locator(".alternatives li button").first
    expected = other.inner_text().replace("␣", " ").replace("⏎", "\n")
    other.click()
    expect(page.locator(".split article")).to_have_count(2)
    expect(page.locator(".split .stats").nth(1)).to_contain_text("[")
    before, after = tokens_of(page, 0), tokens_of(page, 1)
    assert after[:40] == before[:40]
    assert after[40].strip() == expected.strip() != before[40].strip()
    assert len(after) > 41
    cached = re.match(r"(\d+) tokens were in the prefix cache", page.locator(".split + .hint").inner_text())
    assert cached is not None
    assert int(cached[1]) >= 32
    page.get_by_role("button", name="Go on with this").last.click()
    expect(page.locator(".branches")).to_contain_text("2 of 2")


def test_all_alternatives_run_at_once_on_shared_blocks(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    show_tokens(page)
    answer_greedily(page, "Write a long story about a lighthouse and a storm.", max_tokens=50)
    page.get_by_role("tab", name="KV").click()
    page.get_by_label("max_tokens").fill("300")
    page.locator(".token").nth(45).hover()
    page.get_by_role("button", name="Fork into all").click()
    expect(page.locator(".row:not(.future) .block.many em").first).to_have_text("×7")
    expect(page.locator(".split article")).to_have_count(8)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".split .stats").nth(7)).to_contain_text("[stopped]")


def test_edited_message_and_other_answers_are_branches(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    answer_greedily(page, "Say one word.", max_tokens=8)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("Say two words.")
    page.locator("article.user form").get_by_role("button", name="Send").click()
    expect(page.locator("article.user .branches")).to_contain_text("2 of 2")
    expect(page.locator(".stats").last).to_contain_text("[")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("article.assistant .branches")).to_contain_text("2 of 2")
    expect(page.locator(".stats").last).to_contain_text("[")
    page.locator("article.user").get_by_role("button", name="Branch before").click()
    expect(page.locator("article.user .text")).to_have_text("Say one word.")
    expect(page.locator("article.assistant .branches")).to_have_count(0)


def test_answer_goes_on_after_its_limit(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    answer_greedily(page, "Tell me a story about a fox.", max_tokens=10)
    expect(page.locator(".stats").last).to_contain_text("[length]")
    first = page.locator(".markdown").inner_text()
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".markdown")).not_to_have_text(first)  # the first answer's figures say "10 new" too
    expect(page.locator(".stats").last).to_contain_text("10 new")
    expect(page.locator(".stats").last).to_contain_text("[length]")
    whole = page.locator(".markdown").inner_text()
    assert whole.startswith(first)
    assert len(whole) > len(first)
    assert page.locator("article.assistant").count() == 1


def test_message_that_fails_comes_back_and_is_no_part_of_the_next_request(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url, allowed=("400",))
    send(page, "word " * 9000, max_tokens=8)
    expect(page.get_by_role("alert")).to_contain_text("Not sent")
    assert page.locator("#log article").count() == 0
    assert page.get_by_label("Message", exact=True).input_value().startswith("word word")
    page.get_by_label("Message", exact=True).fill("Hi")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".stats")).to_contain_text("[")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_markdown_runs_no_markup_of_an_answer(server: Serving, open_page: OpenPage) -> None:
    page = open_page(server.url)
    drawn = page.evaluate(
        """async (text) => {
          const { Markdown } = await import("/page/markdown.js");
          return Markdown({ text }).props.dangerouslySetInnerHTML.__html;
        }""",
        "<img src=x onerror=alert(1)> [a](javascript:alert(1)) [b](https://example.com) ![c](https://example.com/c.png)"
        "\n\n| x |\n| - |\n| 1 |\n\n```python\n<b>code</b>\n```\n",
    )
    assert "<img" not in drawn
    assert 'href="javascript' not in drawn
    assert '<a href="https://example.com" target="_blank" rel="noopener noreferrer">b</a>' in drawn
    assert "<td>1</td>" in drawn
    assert "&lt;b&gt;code&lt;/b&gt;" in drawn
    assert "Copy code" in drawn
