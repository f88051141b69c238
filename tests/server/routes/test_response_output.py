"""Items of a response, from pieces of text."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.process.messages import ChoiceUpdate
from quire.server.protocol.response_items import FunctionTool
from quire.server.protocol.tools import Offer
from quire.server.routes.response_job import ResponseJob
from quire.server.routes.response_output import Event, ResponseOutput
from quire.server.tools import plan_tools
from tests.engine.builders import byte_tokenizer

TOOLS = [FunctionTool(type="function", name=name).chat_tool() for name in ("weather", "now")]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Orléans"}}</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
KNOWS_TOOLS = "{% if tools %}<tool_call>{% endif %}"


def output(*, has_tools: bool = True, is_parallel: bool = True) -> ResponseOutput:
    offer = Offer(TOOLS, "auto") if has_tools else None
    use = plan_tools(KNOWS_TOOLS, byte_tokenizer(), offer, is_parallel=is_parallel)
    nothing: Any = None
    return ResponseOutput(ResponseJob(nothing, "resp_1", 0, "m", nothing, nothing, None, use))


def written(
    pieces: list[str], reason: str = "stop", **settings: bool
) -> tuple[list[Event], list[dict[str, Any]]]:  # fmt: skip
    """Events and items of a text that comes in these pieces."""
    made = output(**settings)
    events = made.begin()
    for piece in pieces[:-1]:
        events += made.write(ChoiceUpdate(0, piece, [1]))
    events += made.write(ChoiceUpdate(0, pieces[-1], [1], finish_reason=reason))
    return events, made.items


def shown(items: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Items without their ids."""
    return [
        ("message", item["content"][0]["text"], item["status"])
        if item["type"] == "message"
        else (item["name"], item["arguments"], item["status"])
        for item in items
    ]


def rebuilt(events: list[Event]) -> list[dict[str, Any]]:
    """The items as a client builds them from the events, which must come in OpenAI's order."""
    items: list[dict[str, Any]] = []
    text = ""
    state = "done"
    for kind, content in events:
        what = kind.removeprefix("response.")
        index = content["output_index"]
        if what == "output_item.added":
            assert (state, index) == ("done", len(items))
            items.append(dict(content["item"]))
            assert items[-1]["status"] == "in_progress"
            state, text = "added", ""
            continue
        assert index == len(items) - 1
        if what == "content_part.added":
            assert (state, items[-1]["type"], content["content_index"]) == ("added", "message", 0)
            state = "open"
        elif what in ("output_text.delta", "function_call_arguments.delta"):
            assert state in ("open", "added")
            text += content["delta"]
        elif what in ("output_text.done", "function_call_arguments.done"):
            assert content.get("text", content.get("arguments")) == text
            state = "closing"
        elif what == "content_part.done":
            assert (state, content["part"]["text"]) == ("closing", text)
        else:
            assert (what, state) == ("output_item.done", "closing")
            assert content["item"]["id"] == items[-1]["id"]
            items[-1] = content["item"]
            state = "done"
        if what != "output_item.done":
            assert content["item_id"] == items[-1]["id"]
    assert state == "done"
    return items


def test_text_then_calls() -> None:
    events, items = written([f"Let me see. {CALL}{SECOND}"])
    assert shown(items) == [
        ("message", "Let me see.", "completed"),
        ("weather", '{"city": "Orléans"}', "completed"),
        ("now", "{}", "completed"),
    ]
    assert rebuilt(events) == items
    ids = [item["id"] for item in items]
    assert [name.split("_")[0] for name in ids] == ["msg", "fc", "fc"]
    assert items[1]["call_id"] != items[1]["id"]
    assert items[1]["call_id"] != items[2]["call_id"]


def test_text_between_calls_is_an_item_of_its_own() -> None:
    _, items = written([CALL + "and the time: " + SECOND])
    assert [kind for kind, _, _ in shown(items)] == ["weather", "message", "now"]


def test_one_call_only() -> None:
    _, items = written([CALL + SECOND], is_parallel=False)
    assert [kind for kind, _, _ in shown(items)] == ["weather"]


def test_no_text_at_all_is_one_empty_message() -> None:
    for has_tools in (True, False):
        events, items = written([""], has_tools=has_tools)
        assert shown(items) == [("message", "", "completed")]
        assert rebuilt(events) == items


def test_what_was_cut_off_is_incomplete() -> None:
    assert shown(written(["Hello"], "length")[1]) == [("message", "Hello", "incomplete")]
    assert shown(written([CALL[:-20]], "length")[1])[0][2] == "incomplete"
    assert shown(written([CALL[:-3]], "length")[1])[0][2] == "completed", "its arguments are whole"


def test_without_tools_calls_are_text() -> None:
    assert shown(written([CALL], has_tools=False)[1]) == [("message", CALL, "completed")]


TEXTS = st.lists(
    st.sampled_from([CALL, SECOND, "Hello ", " ", "<tool", "{", '"name"', "wörld", '<tool_call>{"name": "other"}']),
    min_size=1, max_size=6,
).map("".join)  # fmt: skip


@given(TEXTS, st.data(), st.sampled_from(["stop", "length"]), st.booleans())
def test_items_and_events_do_not_depend_on_the_pieces(
    text: str, data: st.DataObject, reason: str, parallel: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = written([text], reason, is_parallel=parallel)[1]
    events, items = written(pieces, reason, is_parallel=parallel)
    assert shown(items) == shown(whole)
    assert rebuilt(events) == items
    for item in items:
        if item["type"] == "function_call" and item["status"] == "completed":
            json.loads(item["arguments"])
