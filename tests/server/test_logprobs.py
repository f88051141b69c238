import math

from quire.outputs import CompletionOutput, Logprob, PositionLogprobs
from quire.server.logprobs import LEAST, LogprobWriter, TextLogprobs
from quire.text.detokenizer import IncrementalDetokenizer
from tests.engine.builders import EOS, byte_tokenizer

# The sampled token comes first and is third in rank.
POSITION: PositionLogprobs = {99: Logprob(-3.0, 3, "c"), 97: Logprob(-1.0, 1, "a"), 98: Logprob(-2.0, 2, "b")}
# The sampled token is the most likely one.
LIKELIEST: PositionLogprobs = {97: Logprob(-0.5, 1, "a"), 98: Logprob(-math.inf, 2, "b")}


def writer(num_top: int, *, as_ids: bool = False) -> LogprobWriter:
    return LogprobWriter(byte_tokenizer(), num_top, as_ids=as_ids)


def test_chat_lists_the_most_likely_tokens_best_first() -> None:
    first, second = writer(2).chat([POSITION, LIKELIEST])["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("c", -3.0, [99])
    assert [top["token"] for top in first["top_logprobs"]] == ["a", "b"]
    assert [top["token"] for top in second["top_logprobs"]] == ["a", "b"]
    assert second["top_logprobs"][1]["logprob"] == LEAST


def test_legacy_keeps_the_more_likely_of_two_tokens_with_the_same_text() -> None:
    position = {99: Logprob(-3.0, 3, "c"), 200: Logprob(-1.0, 1, "\ufffd"), 201: Logprob(-2.0, 2, "\ufffd")}
    assert writer(2).legacy([99], [position])["top_logprobs"] == [{"\ufffd": -1.0, "c": -3.0}]


def text_logprobs(token_ids: list[int], *, skips: bool = True) -> TextLogprobs:
    """Log-probabilities of these tokens; the bytes of an entry name its token."""
    made = TextLogprobs(writer(0), IncrementalDetokenizer(byte_tokenizer(), [97], skip_special_tokens=skips))
    made.add(CompletionOutput(0, "", token_ids, None, [{token_id: Logprob(-1.0, 1, "")} for token_id in token_ids]))
    return made


def shown(entries: list[dict[str, object]]) -> list[object]:
    return [entry["bytes"] for entry in entries]


def test_character_has_the_entries_of_all_its_tokens() -> None:
    found = text_logprobs(list("aöb".encode()))
    assert [shown(found.take(at, at + 1)) for at in range(3)] == [[[97]], [[0xC3], [0xB6]], [[98]]]
    found = text_logprobs([97, 0xC3])
    assert shown(found.take(0, 1)) == [[97]]
    assert shown(found.take_rest(1)) == [[0xC3]], "the character never came"


def test_special_token_belongs_to_the_next_character_if_it_is_skipped() -> None:
    eos = [list(b"<eos>")]
    assert shown(text_logprobs([EOS, 97]).take(0, 1)) == [*eos, [97]]
    found = text_logprobs([EOS, 97], skips=False)
    assert (shown(found.take(0, 2)), shown(found.take(2, 6))) == (eos, [[97]]), "with the first part that has it"


def test_text_that_was_not_taken_has_no_rest() -> None:
    found = text_logprobs(list(b"ab--"))
    assert shown(found.take(0, 2)) == [[97], [98]]
    assert shown(found.take_rest(4)) == [], "a call followed"
    assert shown(found.take_rest(2)) == [[45], [45]], "a stop string that was cut off"
