from typing import Any

import pytest

from quire.engine.progress_bar import open_progress_bar


class Bar:
    def __init__(self, **options: Any) -> None:
        self.total = options["total"]
        self.num_done = 0
        self.text = ""
        self.is_closed = False

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def update(self, count: int) -> None:
        self.num_done += count

    def close(self) -> None:
        self.is_closed = True


def test_prompts_and_speeds_are_shown_and_the_bar_is_closed() -> None:
    bars: list[Bar] = []
    with open_progress_bar(lambda **options: bars.append(Bar(**options)) or bars[-1], 3) as progress:
        progress.advance(0)
        assert bars[0].text == ""
        progress.advance(2, 10, 20)
    (bar,) = bars
    assert (bar.total, bar.num_done, bar.is_closed) == (3, 2, True)
    assert "input" in bar.text
    assert "output" in bar.text


def test_the_bar_is_closed_after_an_error() -> None:
    bar = Bar(total=1)
    with pytest.raises(ZeroDivisionError), open_progress_bar(lambda **options: bar, 1):
        raise ZeroDivisionError
    assert bar.is_closed


def test_without_a_bar_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress_bar(False, 3) as progress:
        progress.advance(1, 1, 1)
    assert capsys.readouterr() == ("", "")


def test_the_bar_is_tqdms(capsys: pytest.CaptureFixture[str]) -> None:
    with open_progress_bar(True, 3) as progress:
        progress.advance(3, 10, 20)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Prompts" in captured.err
    assert "3/3" in captured.err
