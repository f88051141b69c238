import math

from quire.outputs import Logprob, PositionLogprobs
from quire.server.logprobs import LEAST, LogprobWriter, prompt_logprobs
from tests.engine.builders import byte_tokenizer

# The chosen token comes first and is third in rank.
POSITION: PositionLogprobs = {99: Logprob(-3.0, 3, "c"), 97: Logprob(-1.0, 1, "a"), 98: Logprob(-2.0, 2, "b")}
# The chosen token is the likeliest.
LIKELIEST: PositionLogprobs = {97: Logprob(-0.5, 1, "a"), 98: Logprob(-math.inf, 2, "b")}


def writer(num_top: int, *, as_ids: bool = False) -> LogprobWriter:
    return LogprobWriter(byte_tokenizer(), num_top, as_ids=as_ids)


def test_chat_lists_the_likeliest_best_first() -> None:
    first, second = writer(2).chat([POSITION, LIKELIEST])["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("c", -3.0, [99])
    assert [top["token"] for top in first["top_logprobs"]] == ["a", "b"]
    assert [top["token"] for top in second["top_logprobs"]] == ["a", "b"]
    assert second["top_logprobs"][1]["logprob"] == LEAST


def test_chat_without_top_lists_the_chosen_one_only() -> None:
    (entry,) = writer(0).chat([POSITION])["content"]
    assert (entry["token"], entry["top_logprobs"]) == ("c", [])


def test_a_part_of_a_character_has_its_own_byte() -> None:
    (entry,) = writer(0).chat([{0xC3: Logprob(-1.0, 1, "\ufffd")}])["content"]
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xC3])


def test_tokens_as_ids() -> None:
    made = writer(1, as_ids=True)
    assert made.chat([POSITION])["content"][0]["token"] == "token_id:99"
    assert made.legacy([99], [POSITION])["top_logprobs"] == [{"token_id:97": -1.0, "token_id:99": -3.0}]


def test_legacy_has_parallel_lists_with_running_offsets() -> None:
    made = writer(1)
    first = made.legacy([104, 99], [None, POSITION])
    assert first == {
        "tokens": ["h", "c"], "token_logprobs": [None, -3.0], "top_logprobs": [None, {"a": -1.0, "c": -3.0}],
        "text_offset": [0, 1],
    }  # fmt: skip
    assert made.legacy([97], [LIKELIEST])["text_offset"] == [2]


def test_legacy_with_no_top_has_the_chosen_one() -> None:
    assert writer(0).legacy([99], [POSITION])["top_logprobs"] == [{"c": -3.0}]


def test_of_two_tokens_that_look_the_same_the_likelier_stays() -> None:
    position = {99: Logprob(-3.0, 3, "c"), 200: Logprob(-1.0, 1, "\ufffd"), 201: Logprob(-2.0, 2, "\ufffd")}
    assert writer(2).legacy([99], [position])["top_logprobs"] == [{"\ufffd": -1.0, "c": -3.0}]


def test_prompt_logprobs_have_vllms_shape() -> None:
    assert prompt_logprobs([None, LIKELIEST]) == [
        None,
        {
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": LEAST, "rank": 2, "decoded_token": "b"},
        },
    ]
