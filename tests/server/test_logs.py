import json
import logging

import pytest

from quire.server.logs import MAX_VALUE_CHARACTERS, JsonFormatter, TextFormatter, shown


def record(message: str = "hello", *, error: BaseException | None = None, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("quire.test", logging.INFO, "file.py", 1, message, None, None)
    made.fields = fields
    if error is not None:
        made.exc_info = (type(error), error, None)
    return made


def test_text_has_names_and_values() -> None:
    line = TextFormatter().format(record(status=200, path="/a", key="-", text="two words"))
    assert line == 'INFO quire.test: hello status=200 path=/a key=- text="two words"'


def test_json_is_one_object() -> None:
    found = json.loads(JsonFormatter().format(record(status=200, path="/a\r\nb")))
    assert (found["level"], found["logger"], found["message"], found["status"]) == ("info", "quire.test", "hello", 200)
    assert found["path"] == "/a\r\nb"
    assert found["time"].endswith("+00:00")


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
@pytest.mark.parametrize("text", ["a\r\nINFO forged", "\x1b[2J", "\u2028", "\x9b0m", "\u202etxt", "\x00", "\ud800"])
def test_control_characters_are_escaped(formatter: logging.Formatter, text: str) -> None:
    line = formatter.format(record(text, path=text))
    assert line.isprintable()
    assert line.isascii()


def test_fields_cannot_replace_level_and_message() -> None:
    assert json.loads(JsonFormatter().format(record(level="debug", message="other")))["level"] == "info"


def test_values_are_cut() -> None:
    assert len(shown("a" * 10_000)) == MAX_VALUE_CHARACTERS
    assert len(JsonFormatter().format(record(path="a" * 10_000))) < 500


@pytest.mark.parametrize(
    ("value", "text"), [(1.5, "1.5"), ("a b", '"a b"'), ('"', '"\\""'), ("a=b", '"a=b"'), ("", '""')]
)
def test_values_that_are_not_plain_are_quoted(value: object, text: str) -> None:
    assert shown(value) == text


def test_tracebacks_stay_readable() -> None:
    assert "ValueError: bad" in TextFormatter().format(record(error=ValueError("bad")))
    assert "ValueError: bad" in json.loads(JsonFormatter().format(record(error=ValueError("bad"))))["traceback"]
