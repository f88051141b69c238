"""The page's chat while the server loads, restarts, is replaced, or refuses a message, on tiny models."""

import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from benchmarks.server_process import ServerProcess, quire_serve
from tests.cli.tiny_directory import make_tiny_directory
from tests.page.conftest import LIMIT_MS, OpenPage
from tests.page.test_conversations import ask
from tests.server.serving import Serving, serving

expect.set_options(timeout=LIMIT_MS)
SLOW = {"QUIRE_FAULTS": "slow-step:ms=30"}
NOISE = (
    "503",
    "401",
    "400",
    "ERR_CONNECTION_REFUSED",
    "ERR_INCOMPLETE_CHUNKED_ENCODING",
    "ERR_EMPTY_RESPONSE",
    "ERR_CONNECTION_RESET",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture
def servers() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def slow_server(model: Path) -> Iterator[Serving]:
    with serving(model, **SLOW) as server:
        yield server


@pytest.fixture
def answering(slow_server: Serving, open_page: OpenPage) -> tuple[Serving, Page]:
    """Return a slow server and its page, which shows the first tokens of a long answer."""
    page = open_page(slow_server.url, allowed=NOISE)
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_text("Parameters").click()
    page.get_by_label("temperature").fill("0")
    page.get_by_label("Message", exact=True).fill("Hello")
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_tokens(page, 4)
    return slow_server, page


def wait_for_tokens(page: Page, number: int) -> None:
    page.wait_for_function("number => document.querySelectorAll('.token').length >= number", arg=number)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_overlong_message_says_by_how_much_and_comes_back(tiny_server: Serving, open_page: OpenPage) -> None:
    page = open_page(tiny_server.url, allowed=NOISE)
    ask(page, "Hi")
    page.get_by_label("Message", exact=True).fill("a" * 4184)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text(re.compile(r"Not sent: .* shorten the prompt by 1\d\d tokens"))
    assert page.get_by_label("Message", exact=True).input_value() == "a" * 4184
    expect(page.locator("#log article")).to_have_count(2)
    ask(page, "Hello")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator("#log article")).to_have_count(4)


def test_chat_goes_on_after_the_engine_was_replaced(answering: tuple[Serving, Page]) -> None:
    server, page = answering
    server.engine().kill()
    expect(page.locator("header .status")).to_contain_text("restarting")
    expect(page.locator("article.assistant [role=alert]")).to_contain_text("the engine process")
    # A message that is sent meanwhile waits for the engine.
    page.get_by_label("Message", exact=True).fill("Are you there?")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("header .status")).to_contain_text("ready")
    expect(page.locator("article.assistant").last.locator(".token")).not_to_have_count(0)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".stats").last).to_contain_text("[stopped]")
    page.locator("article.assistant").first.get_by_role("button", name="Continue").click()
    expect(page.locator("article.assistant").first.get_by_role("alert")).to_have_count(0)
    page.get_by_role("button", name="Stop").click()


def test_server_that_is_replaced_by_another_model(
    model: Path, tmp_path: Path, open_page: OpenPage, servers: contextlib.ExitStack
) -> None:
    port = str(free_port())
    first = servers.enter_context(serving(model, "--port", port, name="first"))
    page = open_page(first.url, allowed=NOISE)
    page.get_by_role("button", name="Tokens", exact=True).click()
    ask(page, "Hello")
    first.kill()
    expect(page.locator("header .status")).to_contain_text("reconnecting")
    page.get_by_label("Message", exact=True).fill("Nobody is there")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator(".chat > .error")).to_contain_text("the server does not answer")
    assert page.get_by_label("Message", exact=True).input_value() == "Nobody is there"
    expect(page.locator(".banner")).to_contain_text("trying again")
    other = make_tiny_directory(tmp_path / "other", vocab_size=260, max_position_embeddings=512)
    add_token(other)
    servers.enter_context(serving(other, "--port", port, name="second"))
    expect(page.get_by_text("This server now has second instead of first")).to_be_visible()
    expect(page.locator("header .status")).to_contain_text("second ready")
    expect(page.locator("article.assistant h3").first).to_contain_text("first")
    cut = page.locator("article.assistant").first
    expect(cut.get_by_role("button", name="Continue")).to_be_disabled()
    expect(cut.locator(".hint")).to_contain_text("second cannot go on behind its tokens")
    page.locator(".token").first.hover()
    expect(page.locator(".alternatives button").first).to_be_disabled()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("article.assistant h3").last).to_contain_text("second")
    expect(page.locator(".stats").last).to_contain_text("[")


def add_token(directory: Path) -> None:
    """Add a token to a tiny model's vocabulary, and rows for it to its weights."""
    import numpy as np
    from safetensors.numpy import load_file, save_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens(["hello"])
    tokenizer.save(str(directory / "tokenizer.json"))
    weights = load_file(directory / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name] = np.vstack([weights[name], weights[name][:2]])
    save_file(weights, directory / "model.safetensors")


def test_model_on_demand_is_loaded_by_its_first_message_and_then_shown(model: Path, open_page: OpenPage) -> None:
    server = ServerProcess(quire_serve(f"a={model}", f"b={model}", "--kv-cache-memory-bytes", "1MiB", name=None))
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        page = open_page(server.url, allowed=NOISE)
        choice = page.get_by_role("combobox", name="Model", exact=True)
        choice.select_option("b")
        expect(page.locator("header .status")).to_contain_text("not loaded: the next message loads it")
        expect(page.locator(".banner")).to_have_count(0)
        for name in ("a", "b"):
            choice.select_option(name)
            ask(page, "Hi", max_tokens=3)
            expect(page.locator(".stats").last).to_contain_text("3 new")
            expect(page.locator("header .status")).to_contain_text(f"{name} ready")
            page.get_by_text("Request as JSON and curl").click()
            expect(page.locator("pre").first).to_contain_text(f'"model": "{name}"')
            page.get_by_text("Request as JSON and curl").click()
        page.close()


def test_server_that_needs_a_key_asks_for_it_and_keeps_the_conversation(
    model: Path, open_page: OpenPage, servers: contextlib.ExitStack
) -> None:
    port = str(free_port())
    first = servers.enter_context(serving(model, "--port", port))
    page = open_page(first.url, allowed=NOISE)
    ask(page, "Hello")
    first.kill()
    servers.enter_context(serving(model, "--port", port, QUIRE_API_KEY="secret"))
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Use the key").click()
    expect(page.locator("article.user .text")).to_have_text("Hello")
    expect(page.locator("header .status")).to_contain_text("ready")
    ask(page, "Again")
    expect(page.locator("#log article")).to_have_count(4)
    page = open_page(first.url, allowed=NOISE)
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Use the key").click()
    expect(page.get_by_role("alert")).to_contain_text("does not know this key")
    page.get_by_label("API key").fill("secret")
    page.get_by_role("button", name="Use the key").click()
    expect(page.locator("header .status")).to_contain_text("ready")
    ask(page, "Hello", max_tokens=4)
    expect(page.locator(".stats")).to_contain_text("4 new")
    page.reload()
    expect(page.locator("header .status")).to_contain_text("ready")


def test_reload_within_an_answer_keeps_its_beginning(answering: tuple[Serving, Page]) -> None:
    _, page = answering
    page.evaluate(
        """async () => {
          const { conversations } = (await import("/page/app.js")).chat;
          while (!conversations.current.revision) await new Promise(requestAnimationFrame);
        }"""
    )  # it is saved while it is written
    page.reload()
    wait_for_tokens(page, 4)
    expect(page.locator("article.user .text")).to_have_text("Hello")
    num_kept = page.locator(".token").count()
    page.get_by_role("button", name="Continue").click()
    wait_for_tokens(page, num_kept + 3)
    page.get_by_role("button", name="Stop").click()
