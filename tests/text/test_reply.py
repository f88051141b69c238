"""A reply is reasoning, content and calls, the same for every cut of its text."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.reasoning import FORMATS as REASONING
from quire.text.reasoning import ReasoningFormat
from quire.text.reply import (
    CallReading,
    ContentDelta,
    ReasoningDelta,
    ReplyReader,
    ToolCallStart,
)
from quire.text.tool_calls.formats import FORMATS, GENERIC
from quire.text.tool_calls.schemas import ToolSchemas
from tests.text.tool_calls.builders import TOOLS, cuts

THINK = ReasoningFormat()
GPT_OSS = next(item for item in REASONING if item.is_harmony)
ULM = '{"city": "Ulm"}'
CALL = [("weather", ULM)]
HM = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
LOOKING = "<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant"
MESSAGE = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
Reply = tuple[str, str, list[tuple[str, str]]]


def reading(name: str, **fields: Any) -> CallReading:
    return CallReading(format=FORMATS[name], schemas=ToolSchemas(TOOLS), **fields)


def read(reader: ReplyReader, pieces: list[str]) -> Reply:
    """Return joined reasoning, content and calls; content is at its place in the text, line breaks between excepted."""
    events = [event for piece in pieces for event in reader.events(piece, ends=False)]
    events += reader.events("", ends=True)
    whole, reasoning, content, calls = "".join(pieces), "", "", list[tuple[str, str]]()
    for event in events:
        if isinstance(event, ReasoningDelta):
            reasoning += event.text
        elif isinstance(event, ContentDelta):
            assert event.text in (whole[event.start : event.start + len(event.text)], "\n")
            content += event.text
        elif isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        else:
            assert isinstance(json.loads(event.text), dict)
            calls[event.index] = (calls[event.index][0], event.text)
    return reasoning, content, calls


GPT_OSS_TEXTS: list[tuple[str, Reply]] = [
    (f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{ULM}", ("", "", CALL)),
    (f"{HM} to=functions.weather<|channel|>commentary json<|message|>{ULM}<|call|>", ("Hm.", "", CALL)),
    (f"{HM}{MESSAGE}{ULM}<|call|>", ("Hm.", "", CALL)),
    (f"{HM}<|channel|>analysis to=functions.weather <|constrain|>json<|message|>{ULM}<|call|>", ("Hm.", "", CALL)),
    (f"{HM}<|channel|>commentary to=weather<|message|>{ULM}", ("Hm.", "", CALL)),
    (f"{HM}{LOOKING}{MESSAGE}{ULM}<|call|>", ("Hm.", "Looking.", CALL)),
    (f"{HM}{HM.replace('Hm', 'More')}<|channel|>final <|constrain|>json<|message|>{ULM}<|return|>",
     ("Hm.\nMore.", ULM, [])),
    (f"{HM}<|channel|>final<|message|>Four.<|return|>", ("Hm.", "Four.", [])),
    (f"{HM}{LOOKING}<|channel|>final<|message|>Four.", ("Hm.", "Looking.\nFour.", [])),
    (f"{HM}{MESSAGE}{ULM}<|call|><|start|>assistant{MESSAGE}{{}}<|call|>", ("Hm.", "", [*CALL, ("weather", "{}")])),
    (f"{HM}{MESSAGE}{ULM}}}<|call|>", ("Hm.", "", CALL)),
    (f"{HM}{MESSAGE}{ULM[:-1]}<|call|>", ("Hm.", "", CALL)),
    (f"{HM}{MESSAGE}{ULM[:-1]}", ("Hm.", f"<|start|>assistant{MESSAGE}{ULM[:-1]}", [])),
    (f"{HM}{MESSAGE}[1]<|call|>", ("Hm.", f"<|start|>assistant{MESSAGE}[1]", [])),
    (f"{HM}<|channel|>commentary to=functions.nope<|message|>{{}}<|call|>",
     ("Hm.", "<|start|>assistant<|channel|>commentary to=functions.nope<|message|>{}", [])),
    (f"{HM}<|channel|>analysis to=python code<|message|>print(1)<|call|>", ("Hm.\nprint(1)", "", [])),
    (f"{HM}<|channel|>final<|message|>a <| b <|en", ("Hm.", "a <| b <|en", [])),
    ("<|channel|>final<|message|>One.<|channel|>final<|message|>Two.", ("", "One.\nTwo.", [])),
    ("Four. <|", ("", "Four. <|", [])), ("analysisHm.assistantfinalFour.", ("", "analysisHm.assistantfinalFour.", [])),
    ("<|channel|>analysis<|message|>cut", ("cut", "", [])), ("<|channel|>fin", ("", "<|channel|>fin", [])),
    ("<|channel|> is a marker of mine", ("", "<|channel|> is a marker of mine", [])), ("", ("", "", [])),
    (f"{HM}<|channel|>final<|message|>Four.<|end|>\n", ("Hm.", "Four.", [])),
    ("<|channel|>" + "x" * 2000, ("", "<|channel|>" + "x" * 2000, [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reply"), GPT_OSS_TEXTS)
def test_messages_of_gpt_oss_are_reasoning_content_and_calls(text: str, reply: Reply) -> None:
    for pieces in cuts(text):
        assert read(ReplyReader(GPT_OSS, reading("harmony")), pieces) == reply


def test_messages_of_gpt_oss_are_read_without_tools_and_with_other_formats_of_calls() -> None:
    text = f"{HM}{LOOKING}<|channel|>final<|message|>"
    call = '[{"name":"weather","arguments":{"city":"Ulm"}}]'
    for pieces in cuts(f"{text}Four."):
        assert read(ReplyReader(GPT_OSS, None), pieces) == ("Hm.", "Looking.\nFour.", [])
        assert read(ReplyReader(None, reading("harmony")), pieces) == ("Hm.", "Looking.\nFour.", [])
    for pieces in cuts(f"{HM}<|channel|>final<|message|>{call}"):
        assert read(ReplyReader(GPT_OSS, reading("generic", schema={})), pieces) == ("Hm.", "", CALL)
    open_format = ReasoningFormat(GPT_OSS.start, GPT_OSS.end, is_open=True, is_harmony=True)
    for pieces in cuts(f"Hm.<|end|><|start|>assistant{MESSAGE}{ULM}"):
        assert read(ReplyReader(open_format, reading("harmony")), pieces) == ("Hm.", "", CALL)


PARTS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "assistant",
         "user", " to=functions.weather", "to=python", "analysis", "final", "commentary", ULM, "{", "x", "\n",
         " ", "<|"]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=20), st.booleans())
def test_any_cut_of_messages_gives_the_same_reply(parts: list[str], is_open: bool) -> None:
    format = ReasoningFormat(GPT_OSS.start, GPT_OSS.end, is_open=is_open, is_harmony=True)
    results = [
        read(ReplyReader(format, reading("harmony")), pieces)
        for pieces in (parts, ["".join(parts)], list("".join(parts)))
    ]
    assert results[0] == results[1] == results[2]


def test_long_hostile_messages_are_read_in_linear_time() -> None:
    for part in (
        "<|channel|>",
        "<|start|>",
        "<|end|>",
        MESSAGE,
        f"{MESSAGE}{ULM}<|call|>",
        HM,
        " ",
        "to=",
        "<|",
        MESSAGE + "{",
    ):
        text = part * (40_000 // len(part))
        pieces = [text[start : start + 7] for start in range(0, len(text), 7)]
        whole, cut = (read(ReplyReader(GPT_OSS, reading("harmony")), given) for given in ([text], pieces))
        assert cut == whole


REPLIES: list[tuple[str, ReasoningFormat | None, str, Reply]] = [
    ("hermes", THINK,
     f'<think>\nHm.\n</think>\n\nOk.\n<tool_call>{{"name": "weather", "arguments": {ULM}}}</tool_call>',
     ("Hm.", "Ok.", CALL)),
    ("hermes", THINK, f'<think><tool_call>{{"name": "weather", "arguments": {ULM}}}</tool_call></think>No.',
     (f'<tool_call>{{"name": "weather", "arguments": {ULM}}}</tool_call>', "No.", [])),
    ("hermes", THINK, "a</think>b", ("", "a</think>b", [])),
    ("hermes", None, "<think>a</think>b", ("", "<think>a</think>b", [])),
    ("gemma-4", REASONING[5], '<|channel>thought\nHm.<|tool_call>call:weather{city:<|"|>Ulm<|"|>}<tool_call|>',
     ("Hm.", "", CALL)),
    ("command", REASONING[6], "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Four.<|END_RESPONSE|>",
     ("Hm.", "Four.", [])),
    ("apertus", REASONING[8], f'<|inner_prefix|>Hm.<|tools_prefix|>[{{"weather": {ULM}}}]<|tools_suffix|>',
     ("Hm.", "", CALL)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "format", "text", "reply"), REPLIES)
def test_reasoning_comes_before_content_and_calls(
    name: str, format: ReasoningFormat | None, text: str, reply: Reply
) -> None:
    for pieces in cuts(text):
        assert read(ReplyReader(format, reading(name)), pieces) == reply


TEXT = f'<think>Hm.</think>Ok.<tool_call>{{"name": "weather", "arguments": {ULM}}}</tool_call>'


def test_message_and_joined_deltas_are_the_same() -> None:
    message, reason = ReplyReader(THINK, reading("hermes")).message(TEXT, "stop")
    (call,) = message.pop("tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": ULM}}
    assert (message, reason) == ({"content": "Ok.", "reasoning": "Hm.", "reasoning_content": "Hm."}, "tool_calls")
    reader = ReplyReader(THINK, reading("hermes"))
    deltas = list(itertools.chain(*(reader.deltas(piece, ends=False) for piece in TEXT), reader.deltas("", ends=True)))
    assert "".join(delta.get("content", "") for delta in deltas) == "Ok."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    start, arguments = (delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta)
    assert (start["index"], start["function"]) == (0, {"name": "weather", "arguments": ""})
    assert arguments == {"index": 0, "function": {"arguments": ULM}}


def test_content_is_none_beside_calls_alone_and_text_otherwise() -> None:
    call = TEXT.partition("Ok.")[2]
    assert ReplyReader(None, reading("hermes")).message(call, "stop")[0]["content"] is None
    assert ReplyReader(None, reading("hermes")).message("", "stop") == ({"content": ""}, "stop")


def test_finish_reason_tells_calls_unless_one_tool_was_demanded() -> None:
    def reason(calls: CallReading | None, finished: str) -> str | None:
        return ReplyReader(THINK, calls).message(TEXT, finished)[1]

    assert reason(reading("hermes"), "stop") == "tool_calls"
    assert reason(reading("hermes"), "length") == "length"
    assert reason(reading("hermes", is_named=True), "stop") == "stop"
    assert reason(None, "stop") == "stop"
    assert ReplyReader(GPT_OSS, reading("harmony")).message(GPT_OSS_TEXTS[0][0], "stop")[1] == "tool_calls"


def test_reasoning_may_be_dropped() -> None:
    reader = ReplyReader(THINK, reading("hermes"), keeps_reasoning=False)
    assert "reasoning" not in reader.message(TEXT, "stop")[0]


def test_demanded_calls_that_were_cut_off_are_content() -> None:
    text = f'[{{"name":"weather","arguments":{ULM}}},{{"name":"clock","argum'
    message, reason = ReplyReader(None, CallReading(format=GENERIC, schemas=ToolSchemas(TOOLS), schema={})).message(
        text, "length"
    )
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert (message["content"], reason) == ('{"name":"clock","argum', "length")
