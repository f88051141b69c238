"""Log-probabilities of an answer with calls: those of a message cover its text, and nothing of the calls."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.process.messages import ChoiceUpdate
from quire.outputs import Logprob
from quire.server.caller import ANONYMOUS
from quire.server.front_end import FrontEnd
from quire.server.protocol.responses import OutputMessage, ResponsesRequest
from quire.server.protocol.validation import validate
from quire.server.routes.response_job import ResponseJob, prepare_response
from quire.server.routes.response_logprobs import TextLogprobs
from quire.server.routes.response_output import Event, ResponseOutput
from quire.text.detokenizer import IncrementalDetokenizer
from tests.engine.builders import EOS, byte_tokenizer, make_config
from tests.server.fake_engine import MODEL

CALL = '<tool_call>{"name": "now", "arguments": {"zone": "ü"}}</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}{{ message.content }}{% endfor %}"
)


def spans(text: bytes) -> TextLogprobs:
    """All tokens of a text of which each byte is one; its entries are their numbers."""
    made = TextLogprobs(IncrementalDetokenizer(byte_tokenizer(), [97]))
    made.add(list(text), [{"n": index} for index in range(len(text))])
    return made


def numbers(entries: list[dict[str, Any]]) -> list[int]:
    return [entry["n"] for entry in entries]


def test_a_character_has_all_of_its_tokens() -> None:
    found = spans("aöb".encode())
    assert numbers(found.take(0, 1)) == [0]
    assert numbers(found.take(1, 2)) == [1, 2]
    assert numbers(found.take(2, 3)) == [3]


def test_what_stands_between_two_parts_belongs_to_none() -> None:
    found = spans(b"ab--cd")
    assert numbers(found.take(0, 2)) == [0, 1]
    assert numbers(found.take(4, 6)) == [4, 5]
    assert not found.take_rest(6)


def test_what_ends_a_text_belongs_to_its_last_part_if_that_is_its_end() -> None:
    found = spans(b"ab--")
    found.take(0, 2)
    assert not found.take_rest(4), "a call stands behind it"
    assert numbers(found.take_rest(2)) == [2, 3], "nothing of it was shown"


def test_a_token_in_two_parts_is_given_with_the_first() -> None:
    tokenizer = byte_tokenizer()
    found = TextLogprobs(IncrementalDetokenizer(tokenizer, [97]))
    eos = len("<eos>")
    shown = TextLogprobs(IncrementalDetokenizer(tokenizer, [97], skip_special_tokens=False))
    shown.add([EOS, 97], [{"n": 0}, {"n": 1}])
    assert numbers(shown.take(0, 2)) == [0]
    assert numbers(shown.take(2, eos + 1)) == [1]
    # Left out of the text, the same token goes with the one behind it.
    found.add([EOS, 97], [{"n": 0}, {"n": 1}])
    assert numbers(found.take(0, 1)) == [0, 1]


def test_a_character_that_never_comes_is_the_rest() -> None:
    found = spans(b"ab" + "ö".encode()[:1])
    assert numbers(found.take(0, 2)) == [0, 1]
    assert not found.take(2, 3)
    assert numbers(found.take_rest(3)) == [2]


# --- Whole answers ------------------------------------------------------------------------------


def job(**fields: Any) -> ResponseJob:
    front_end = FrontEnd(make_config(max_model_len=2048), byte_tokenizer(), TEMPLATE)
    tools = [{"type": "function", "name": name} for name in ("now", "weather")]
    body = {"model": MODEL, "input": "hi", "tools": tools, "top_logprobs": 1, **fields}
    return prepare_response(front_end, validate(ResponsesRequest, body), ANONYMOUS, MODEL)


def positions(token_ids: list[int]) -> list[dict[int, Logprob]]:
    return [{token_id: Logprob(-0.5, 1, f"t{token_id}")} for token_id in token_ids]


def written(
    text: str, cuts: list[int], *, delay: int = 0, reason: str = "stop", **fields: Any
) -> tuple[list[dict[str, Any]], list[Event]]:
    """Items and events of a text whose tokens, its bytes, come cut like this; text comes `delay` characters late."""
    token_ids = list(text.encode())
    made = ResponseOutput(job(**fields))
    events = made.begin()
    start = shown = 0
    for end in cuts:
        whole = bytes(token_ids[:end]).decode(errors="ignore")
        until = max(shown, len(whole) - delay)
        events += made.write(ChoiceUpdate(0, text[shown:until], token_ids[start:end], positions(token_ids[start:end])))
        start, shown = end, until
    rest = [*token_ids[start:], EOS]
    events += made.write(ChoiceUpdate(0, text[shown:], rest, positions(rest), reason))
    return made.items, events


def covered(item: dict[str, Any]) -> bytes:
    """The text that the tokens of a message's log-probabilities make, without the one that ends it."""
    entries = OutputMessage.model_validate(item).content[0].logprobs
    assert all(len(entry.top_logprobs) == 1 for entry in entries)
    assert all(entry.token != f"t{EOS}" for entry in entries[:-1]), "the end comes last"
    return b"".join(bytes(entry.bytes) for entry in entries if entry.token != f"t{EOS}")


def streamed(events: list[Event], item_id: str) -> list[dict[str, Any]]:
    deltas = [content for kind, content in events if kind == "response.output_text.delta"]
    return [entry for content in deltas if content["item_id"] == item_id for entry in content["logprobs"]]


def check(text: str, cuts: list[int], **options: Any) -> list[dict[str, Any]]:
    items, events = written(text, cuts, **options)
    for item in items:
        if item["type"] == "function_call":
            assert "logprobs" not in item
            continue
        assert covered(item).decode() == item["content"][0]["text"]
        assert streamed(events, item["id"]) == item["content"][0]["logprobs"]
    for kind, content in events:
        assert ("logprobs" in content) == (kind in ("response.output_text.delta", "response.output_text.done"))
    return items


def test_text_and_calls() -> None:
    items = check(f"Lét me  {CALL}{CALL} see. ", [])
    assert [item["type"] for item in items] == ["message", "function_call", "function_call", "message"]
    assert [item["content"][0]["text"] for item in (items[0], items[3])] == ["Lét me", " see. "]
    assert items[3]["content"][0]["logprobs"][-1]["token"] == f"t{EOS}", "as without tools"


def test_a_call_that_is_not_wanted_adds_nothing_to_the_text_before_it() -> None:
    items = check(f"{CALL}wörld {CALL}", [], parallel_tool_calls=False)
    assert items[1]["content"][0]["logprobs"][-1]["token"] == f"t{ord('d')}"
    assert len(items) == 2


def test_a_call_alone_has_none() -> None:
    (item,) = check(CALL, [])
    assert item["type"] == "function_call"


def test_an_answer_without_calls_is_as_without_tools() -> None:
    (with_tools,), _ = written("Hellö", [])
    (without,), _ = written("Hellö", [], tool_choice="none")
    assert with_tools["content"] == without["content"]
    (empty,), _ = written("", [])
    assert [entry["token"] for entry in empty["content"][0]["logprobs"]] == [f"t{EOS}"]


def test_none_where_they_were_not_asked_for() -> None:
    items, events = written(f"a {CALL}", [], top_logprobs=None)
    assert items[0]["content"][0]["logprobs"] == []
    assert all(not content.get("logprobs") for _, content in events)


@pytest.mark.parametrize("parallel", [True, False])
@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([CALL, "wörld ", " ", "<tool", "{", "é", '<tool_call>{"name": "other"}']), max_size=5),
    st.lists(st.integers(0, 200), max_size=8),
    st.integers(0, 5),
    st.sampled_from(["stop", "length"]),
)
def test_any_text_in_any_pieces(parallel: bool, parts: list[str], cuts: list[int], delay: int, reason: str) -> None:
    text = "".join(parts)
    places = sorted(cut for cut in cuts if cut <= len(text.encode()))
    pieces = check(text, places, delay=delay, reason=reason, parallel_tool_calls=parallel)
    whole = check(text, [], reason=reason, parallel_tool_calls=parallel)
    assert [item.get("content") for item in pieces] == [item.get("content") for item in whole]
