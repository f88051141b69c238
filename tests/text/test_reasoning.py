"""Reasoning is split from the answer the same way for every cut of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.reasoning import FORMATS, Piece, ReasoningFormat, ReasoningParser, find_reasoning

THINK, OPEN = ReasoningFormat(), ReasoningFormat(is_open=True)
HARMONY = next(item for item in FORMATS if item.is_harmony)
HUNYUAN = ReasoningFormat(openings=("<answer>",), closing="</answer>")
CHANNEL = ReasoningFormat("<|channel>thought", "<channel|>", breaks_off="<|tool_call>")


class Vocabulary:
    """Encodes a marker as one token, which is special or not."""

    def __init__(self, special: set[int]) -> None:
        self.special_token_ids = special

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [7]


def split(format: ReasoningFormat, *texts: str) -> tuple[str, str]:
    parser, pieces = ReasoningParser(format), list[Piece]()
    for text in texts:
        pieces += parser.feed(text)
    pieces += parser.finish()
    whole = "".join(texts)
    assert all(whole[piece.start : piece.start + len(piece.text)] == piece.text != "" for piece in pieces)
    return tuple("".join(piece.text for piece in pieces if piece.is_reasoning is kind) for kind in (True, False))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("format", "text", "reasoning", "answer"),
    [
        (THINK, "<think>\nHmm. 2 < 3.\n</think>\n\nFour.\n", "Hmm. 2 < 3.", "Four.\n"),
        (THINK, "\n <think>a</think>b", "a", "b"),
        (THINK, "No marks. <think> is text here.", "", "No marks. <think> is text here."),
        (THINK, " Four.", "", " Four."),
        (THINK, "<thin", "", "<thin"),
        (THINK, "<think>\n\n</think>\n\nFour.", "", "Four."),
        (THINK, "<think>it was cut </thi", "it was cut </thi", ""),
        (THINK, "<think>a</think>b</think>c", "a", "b</think>c"),
        (OPEN, "\nHmm.\n</think>Four.", "Hmm.", "Four."),
        (OPEN, "cut", "cut", ""),
        (THINK, "", "", ""),
        (CHANNEL, "<|channel>thought\nHmm.<channel|>Four.", "Hmm.", "Four."),
        (CHANNEL, "<|channel>thought\n<channel|>Four.", "", "Four."),
        (CHANNEL, "<|channel>thought\nHmm <|tool. <|tool_call>call:f{}", "Hmm <|tool.", "<|tool_call>call:f{}"),
        (CHANNEL, "<|channel>thought\na<channel|>b<|tool_call>c", "a", "b<|tool_call>c"),
        (HUNYUAN, "<think>\nHm.\n</think>\n<answer>\nFour.\n</answer>", "Hm.", "Four."),
        (HUNYUAN, "<think>\nHm.\n</think>\n<answer>\nFour.\n</answer>\nMore.", "Hm.", "Four.\nMore."),
        (HUNYUAN, "<think>\nHm.\n</think>\nFour.\n", "Hm.", "Four.\n"),
        (HUNYUAN, "<answer>Four. </ans", "", "Four. </ans"),
    ],
)
def test_text_is_reasoning_then_answer(format: ReasoningFormat, text: str, reasoning: str, answer: str) -> None:
    assert split(format, text) == (reasoning, answer)
    assert split(format, *text) == (reasoning, answer)


@pytest.mark.parametrize("format", [item for item in FORMATS if not item.is_harmony])
def test_each_family_separates_reasoning_and_answer(format: ReasoningFormat) -> None:
    answer = f"{''.join(format.openings)}Four.{format.closing}"
    for text in (f"{format.start}\nHm.\n{format.end}\n\n{answer}", answer):
        reasoning = "Hm." if format.start in text else ""
        assert split(format, text) == split(format, *text) == (reasoning, "Four.")
    assert format.is_taught(f"{format.start} {format.end} {answer}")
    broken = f"{format.start}Hm.{format.breaks_off or format.end}x"
    assert split(format, broken) == ("Hm.", f"{format.breaks_off}x")


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/th", "ink>", "a", " ", "\n", "<thi"]), max_size=12),
       st.booleans(), st.sampled_from(["", "<a", "<thina"]),
       st.sampled_from([(), ("<a", "</th<")]), st.sampled_from(["", "<a", "</tha"]))  # fmt: skip
def test_cut_of_the_text_changes_nothing(
    parts: list[str], is_open: bool, breaks_off: str, openings: tuple[str, ...], closing: str
) -> None:
    format = ReasoningFormat(is_open=is_open, breaks_off=breaks_off, openings=openings, closing=closing)
    text = "".join(parts)
    assert split(format, *parts) == split(format, text) == split(format, *text)


def test_format_comes_from_the_template_and_the_prompt() -> None:
    template = "{% if '</think>' in content %}…"
    plain = Vocabulary(set())
    assert find_reasoning("{{ messages }}", "x", plain) is None
    assert find_reasoning(None, "x", plain) is None
    assert find_reasoning(template, "user: hi", plain) == THINK
    assert find_reasoning(template, "user: hi\n<think>\n", plain) == OPEN
    assert find_reasoning(template, "user: hi\n<think>\n\n</think>\n\n", plain) is None
    gpt_oss = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    assert find_reasoning(gpt_oss, "<|start|>assistant", plain) == HARMONY
    assert find_reasoning("{{ '<|user|>' + content + '<|end|>' }}", "<|assistant|>", plain) is None
    gemma = "{{ '<|channel>thought\n<channel|>' if not enable_thinking }}"
    assert find_reasoning(gemma, "<|turn>model\n", plain) == CHANNEL
    assert find_reasoning(gemma, "<|turn>model\n<|channel>thought\n<channel|>", plain) is None
    hunyuan = "{{ '</think>' }}<answer>{{ content }}</answer>"
    assert find_reasoning(hunyuan, "user: hi", plain) == HUNYUAN
    assert find_reasoning(hunyuan, "user: hi<think>\n\n</think>", plain) == HUNYUAN
    assert find_reasoning("{# </think> #}", "user: hi", plain) is None
    assert find_reasoning("{{ open('think') }}", "hi<|open|>think<|sep|>", plain) is not None
    assert find_reasoning(template, "user: hi", Vocabulary({7})) == ReasoningFormat(has_special_marker=True)
