from typing import Any

import pytest

from quire.engine.output_processor import OutputProcessor, SequenceOutput
from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request
from quire.types import RequestResult, RequestSpec, RequestStatus
from tests.engine.builders import EOS, VOCAB_SIZE, byte_tokenizer

TOKENIZER = byte_tokenizer()


def make(**params: Any) -> SequenceOutput:
    request = Request(RequestSpec("r", [1], SamplingParams(max_tokens=1000, **params)))
    return SequenceOutput(request, 0, TOKENIZER, TOKENIZER.token_text)


def add(sequence: SequenceOutput, token_id: int, status: RequestStatus | None = None) -> None:
    sequence.request.output_token_ids.append(token_id)
    if status is not None:
        sequence.request.status = status
    sequence.add(RequestResult("r", (token_id,)), (token_id,), sequence.request.status)


def feed(sequence: SequenceOutput, text: str) -> list[str]:
    """Text shown after each byte, up to the end of the sequence."""
    shown = []
    for token_id in text.encode():
        add(sequence, token_id)
        shown.append(sequence.text)
        if sequence.finish_reason is not None:
            break
    return shown


def test_stop_string_is_held_back_and_cut() -> None:
    sequence = make(stop="END")
    assert feed(sequence, "xENyENDz") == ["x", "x", "x", "xENy", "xENy", "xENy", "xENy"]
    assert sequence.finish_reason == "stop"
    assert sequence.stop_reason == "END"
    assert sequence.snapshot().token_ids == list(b"xENyEND"), "tokens are all kept"


def test_stop_string_may_be_kept() -> None:
    sequence = make(stop="END", include_stop_str_in_output=True)
    feed(sequence, "xENDz")
    assert sequence.text == "xEND"


def test_what_was_held_back_is_shown_at_the_end() -> None:
    sequence = make(stop="END")
    feed(sequence, "xE")
    add(sequence, ord("N"), RequestStatus.FINISHED_LENGTH)
    assert sequence.text == "xEN"
    assert sequence.finish_reason == "length"


def test_incomplete_character_at_the_end_is_marked() -> None:
    sequence = make()
    feed(sequence, "a")
    add(sequence, "é".encode()[0], RequestStatus.FINISHED_LENGTH)
    assert sequence.text == "a\ufffd"


@pytest.mark.parametrize(("shown", "expected"), [(False, "a"), (True, "ab")])
def test_stop_token_is_listed_and_shown_only_when_asked_for(shown: bool, expected: str) -> None:
    sequence = make(stop_token_ids=[ord("b")], include_stop_str_in_output=shown)
    feed(sequence, "a")
    sequence.request.stop_reason = ord("b")
    add(sequence, ord("b"), RequestStatus.FINISHED_STOPPED)
    assert sequence.snapshot().token_ids == [97, 98]
    assert sequence.text == expected
    assert sequence.stop_reason == ord("b")


def test_eos_in_the_middle_is_shown_only_without_skipping() -> None:
    for skip, expected in ((True, "ab"), (False, "a<eos>b")):
        sequence = make(skip_special_tokens=skip, ignore_eos=True)
        for token_id in (97, EOS, 98):
            add(sequence, token_id)
        assert sequence.text == expected


def test_stop_strings_wait_for_min_tokens() -> None:
    sequence = make(stop="a", min_tokens=3)
    assert feed(sequence, "aaaba") == ["a", "aa", "aaa", "aaab", "aaab"]
    assert sequence.finish_reason == "stop"


def test_detokenize_false_gives_ids_only() -> None:
    sequence = make(detokenize=False)
    feed(sequence, "ab")
    assert sequence.snapshot().text == ""
    assert sequence.snapshot().token_ids == [97, 98]


@pytest.mark.parametrize(
    ("text", "ends_as", "expected"),
    [
        ("xENDyz", RequestStatus.RUNNING, ("x", "stop", "END", 4)),
        ("xENDyz", RequestStatus.FINISHED_LENGTH, ("x", "stop", "END", 4)),
        ("xyEND", RequestStatus.FINISHED_LENGTH, ("xy", "length", None, 5)),
        ("xyENDz", RequestStatus.FINISHED_STOPPED, ("xy", "stop", "END", 5)),
        ("xyEz", RequestStatus.FINISHED_STOPPED, ("xyE", "stop", None, 4)),
    ],
)
def test_first_end_among_several_tokens_of_a_step_wins(
    text: str, ends_as: RequestStatus, expected: tuple[str, str, str | None, int]
) -> None:
    sequence = make(stop="END")
    token_ids = tuple(text.encode())
    sequence.request.output_token_ids += token_ids
    sequence.add(RequestResult("r", token_ids), token_ids, ends_as)
    taken = sequence.snapshot()
    assert (taken.text, taken.finish_reason, taken.stop_reason, len(taken.token_ids)) == expected


def test_tokens_alone_have_their_text_and_special_ones_too() -> None:
    text = OutputProcessor(TOKENIZER)._token_text
    assert [text(token_id) for token_id in (97, EOS, "é".encode()[0])] == ["a", "<eos>", "\ufffd"]
    assert text(VOCAB_SIZE - 1) == "", "the model's vocabulary may be larger than the tokenizer's"
    assert OutputProcessor(None)._token_text(97) == ""
