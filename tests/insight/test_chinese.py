"""`--lang zh`: no English sentence is left, numbers and names stay, programs get English."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.insight.chinese import html_to_chinese, to_chinese
from quire.text.width import display_width
from tests.cli.command_line import call
from tests.cli.tiny_directory import make_tiny_directory

ENGLISH = re.compile(r"(?<!\w)(?:[a-z]{2,}[,;:]? ){3}[a-z]{2,}(?!\w)")
DEVICE = ("--device", "A100-80GB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048))


def english_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if ENGLISH.search(line)]


def test_tour_in_chinese_leaves_no_english_sentence(model: str) -> None:
    result = call("tour", model, "abc", "--all", "--max-tokens", "3", "--load-format", "dummy", "--lang", "zh")
    assert result.exit_code == 0
    assert "调度器准入请求" in result.stdout
    assert "为什么：" in result.stdout
    assert english_of(result.stdout) == []


@pytest.mark.parametrize("options", [("--ops", "--chunk", "64"), ("--tp", "2", "--kv-dtype", "auto,int8")])
def test_explain_in_chinese_leaves_no_english_sentence(options: tuple[str, ...], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = call("explain", "qwen3-4b", *DEVICE, *options, "--lang", "zh", "--html", str(page))
    assert english_of(result.stdout) == []
    assert english_of(re.sub(r"<style>.*</style>|<[^>]*>", "", page.read_text(), flags=re.DOTALL)) == []
    assert 'lang="zh"' in page.read_text()


@pytest.mark.parametrize("what", ["layer", "ranks"])
def test_view_of_a_model_in_chinese_leaves_no_english_sentence(what: str, tmp_path: Path) -> None:
    svg = tmp_path / "a.svg"
    options = ("--tp", "2", *DEVICE, "--lang", "zh")
    assert english_of(call("view", what, "qwen3-4b", *options).stdout) == []
    call("view", what, "qwen3-4b", *options, "--svg", str(svg))
    texts = [node.text or "" for node in ElementTree.parse(svg).iter() if node.tag.endswith("text")]
    assert any(re.search("[一-鿿]", text) for text in texts)


@pytest.mark.parametrize("what", ["mask", "blocks", "step", "ops"])
def test_view_of_a_step_in_chinese_leaves_no_english_sentence(what: str, model: str, tmp_path: Path) -> None:
    trace = tmp_path / "a.jsonl"
    options = ("--load-format", "dummy", "--max-tokens", "4", "--ignore-eos", "-o", str(trace))
    assert call("trace", model, "abc", *options).exit_code == 0
    assert english_of(call("view", what, str(trace), "--lang", "zh").stdout) == []


def test_language_of_the_environment_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "")
    monkeypatch.setenv("LC_MESSAGES", "")
    for lang, word in (("zh_CN.UTF-8", "参数"), ("en_US.UTF-8", "Parameters")):
        monkeypatch.setenv("LANG", lang)
        assert word in call("explain", "gpt-2", *DEVICE).stdout.splitlines()
    assert "参数" in call("explain", "gpt-2", *DEVICE, "--lang", "zh").stdout.splitlines()


def test_json_is_english_in_any_language() -> None:
    shown = (call("explain", "gpt-2", *DEVICE, "--json", "--lang", lang).stdout for lang in ("en", "zh"))
    english, chinese = map(json.loads, shown)
    assert english == chinese


def test_numbers_and_order_of_parts_are_kept() -> None:
    assert (
        to_chinese("step 3: attention mask of 4 new tokens of 1 request")
        == "第 3 步：1 个请求的 4 个新 token的注意力掩码"
    )
    assert to_chinese("self_attn.qkv_proj") == "self_attn.qkv_proj"
    assert to_chinese("in total: 3 steps, 36 tokens in 446 ms = 80.7 tokens/s") == (
        "合计：3 步，36 个 token 用时 446 ms = 80.7 tokens/s"
    )


def test_page_keeps_its_markup() -> None:
    page = '<html lang="en"><style>p{a:b}</style><p title="left for KV">left for KV</p><p>a &lt; b</p></html>'
    assert html_to_chinese(page) == (
        '<html lang="zh"><style>p{a:b}</style><p title="left for KV">留给 KV</p><p>a &lt; b</p></html>'
    )


def test_chinese_characters_take_two_columns() -> None:
    assert [display_width(text) for text in ("abc", "块表", "→ 块")] == [3, 4, 4]
    lines = call("explain", "gpt-2", *DEVICE, "--lang", "zh").stdout.splitlines()
    table = lines[lines.index("各组设置并列") + 1 : lines.index("各组设置并列") + 4]
    assert len({display_width(line[: line.rindex("  ")]) for line in table}) == 1
