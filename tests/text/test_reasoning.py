"""Reasoning is split from the answer the same way for every cut of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.text.reasoning import FORMATS, Piece, ReasoningFormat, ReasoningParser, find_reasoning

THINK, OPEN = ReasoningFormat(), ReasoningFormat(is_open=True)
FINAL = "<|start|>assistant<|channel|>final<|message|>"
HARMONY = next(item for item in FORMATS if item.openings)
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
        (HARMONY, f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Four.", "Hm.", "Four."),
        (HARMONY, "<|channel|>final<|message|>Four.", "", "Four."),
        (HARMONY, "Four.", "", "Four."),
        (HARMONY, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assi", "Hm.", "<|start|>assi"),
        (
            HARMONY,
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f{}",
            "a",
            "<|channel|>commentary to=functions.f{}",
        ),
    ],
)
def test_text_is_reasoning_then_answer(format: ReasoningFormat, text: str, reasoning: str, answer: str) -> None:
    assert split(format, text) == (reasoning, answer)
    assert split(format, *text) == (reasoning, answer)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/th", "ink>", "a", " ", "\n", "<thi"]), max_size=12),
       st.booleans(), st.sampled_from(["", "<a", "<thina"]), st.sampled_from([(), ("<a", "</th<")]))  # fmt: skip
def test_cut_of_the_text_changes_nothing(
    parts: list[str], is_open: bool, breaks_off: str, openings: tuple[str, ...]
) -> None:
    text, format = "".join(parts), ReasoningFormat(is_open=is_open, breaks_off=breaks_off, openings=openings)
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
    assert find_reasoning(template, "user: hi", Vocabulary({7})) == ReasoningFormat(has_special_marker=True)
