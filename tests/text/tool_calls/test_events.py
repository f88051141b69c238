from quire.text.tool_calls.events import ContentDelta, ToolArgumentsDelta, ToolCallStart


def test_events_are_values() -> None:
    assert ContentDelta("a", 3) == ContentDelta("a", 3) != ContentDelta("a", 4)
    assert ToolCallStart(0, "i", "f") != ToolCallStart(1, "i", "f")
    assert ToolArgumentsDelta(0, "{") == ToolArgumentsDelta(0, "{")
