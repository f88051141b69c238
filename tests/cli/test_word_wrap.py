"""Answers break at words, however their pieces are cut."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli.terminal import Output, WordWrap
from quire.text.width import display_width

TEXT = "The sky is blue, since air scatters short waves.\n\n- one two three four five six\n- seven"


def wrapped(pieces: list[str], columns: int) -> str:
    written: list[str] = []
    wrap = WordWrap(written.append, lambda: columns)
    for piece in pieces:
        wrap.add(piece)
    wrap.end()
    return "".join(written)


def test_lines_break_at_words() -> None:
    assert wrapped([TEXT], 20) == (
        "The sky is blue,\nsince air scatters\nshort waves.\n\n- one two three four\nfive six\n- seven"
    )


def test_a_word_longer_than_the_line_stays_whole() -> None:
    assert wrapped(["see https://example.org/a/long/path now"], 10) == "see\nhttps://example.org/a/long/path\nnow"


def test_chinese_breaks_between_characters_which_take_two_columns() -> None:
    assert wrapped(["天空是蓝色的 because"], 8) == "天空是蓝\n色的\nbecause"


def test_code_blocks_keep_their_lines() -> None:
    code = "```python\n    answer = compute(a, b, c)\n```\n"
    assert wrapped([code, "and then some more words"], 12) == code + "and then\nsome more\nwords"


@given(st.text("ab 天`\n\t", max_size=60), st.lists(st.integers(0, 60), max_size=5), st.integers(2, 12))
def test_pieces_do_not_matter_and_nothing_but_breaks_is_changed(text: str, cuts: list[int], columns: int) -> None:
    ends = [0, *sorted(cuts), len(text)]
    whole = wrapped([text], columns)
    assert wrapped([text[a:b] for a, b in itertools.pairwise(ends)], columns) == whole
    assert re.sub(r"\s", "", whole) == re.sub(r"\s", "", text)
    if "`" not in text and "\t" not in text:
        words = re.findall(r"[^\s天]+", text)
        longest = max(map(display_width, words), default=0)
        assert all(display_width(line.strip()) <= max(columns, longest, 2) for line in whole.splitlines())


def answer_until_interrupted() -> None:
    with Output().answer() as on_text:
        on_text("The sky is blue, since ai")
        on_text("r")
        raise KeyboardInterrupt


def test_answer_is_wrapped_on_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    for is_terminal, expected in ((True, "The sky is blue,\nsince air"), (False, "The sky is blue, since air")):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        with pytest.raises(KeyboardInterrupt):  # what there is must be seen
            answer_until_interrupted()
        assert capsys.readouterr().out == expected
