import inspect
import pickle
import re

import pytest

from quire import errors
from quire.errors import InvalidParameterError, QuireError, nearest

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, QuireError)]
TREE_LINE = re.compile(r"^ {4}(?P<branch>[ │├└─]*)(?P<name>\w+)(?: {2,}(?P<text>.*))?$")


def documented_tree() -> dict[str, tuple[str | None, str]]:
    """Class name -> (its parent in the drawing, the text beside it), from the module docstring."""
    found: dict[str, tuple[str | None, str]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = TREE_LINE.match(line)
        if match and (found or match["name"] == "QuireError"):
            depth = len(match["branch"]) // 4
            path[depth:] = [match["name"]]
            found[match["name"]] = (path[depth - 1] if depth else None, match["text"] or "")
    return found


def test_the_docstring_draws_the_tree_as_it_is() -> None:
    drawn = {name: parent for name, (parent, _) in documented_tree().items()}
    actual = {item.__name__: None if item is QuireError else item.__base__.__name__ for item in CLASSES}
    assert drawn == actual


@pytest.mark.parametrize("error", CLASSES, ids=lambda item: item.__name__)
def test_documented_statuses(error: type[QuireError]) -> None:
    tree = documented_tree()
    name: str | None = error.__name__
    expected: dict[str, int] = {}
    while name is not None:
        parent, text = tree[name]
        for word, number in re.findall(r"(HTTP|exit) (\d+)", text):
            expected.setdefault(word, int(number))
        name = parent
    assert error.http_status == expected.get("HTTP", 500)
    assert error.exit_code == expected.get("exit", 1)


def test_codes_are_distinct_and_machine_readable() -> None:
    codes = [item.code for item in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)


def test_codes_are_stable() -> None:
    # Clients match on these: a change here is a breaking change.
    assert {item.__name__: item.code for item in CLASSES} == {
        "QuireError": "internal_error",
        "ConfigError": "invalid_option",
        "RequestError": "invalid_request",
        "InvalidParameterError": "invalid_parameter",
        "PromptError": "invalid_prompt",
        "ContextLengthError": "context_length_exceeded",
        "ChatTemplateError": "chat_template_error",
        "DuplicateRequestError": "duplicate_request_id",
        "ModelError": "model_error",
        "ModelNotFoundError": "model_not_found",
        "DownloadError": "download_failed",
        "ModelFileError": "model_file_invalid",
        "UnsupportedModelError": "model_unsupported",
        "CapacityError": "capacity",
        "MemoryCapacityError": "out_of_memory",
        "QueueFullError": "queue_full",
        "QueueTimeoutError": "queue_timeout",
        "UnreadError": "reader_too_slow",
        "EngineError": "engine_error",
        "EngineDeadError": "engine_dead",
    }


@pytest.mark.parametrize("error", CLASSES, ids=lambda item: item.__name__)
def test_every_class_says_what_it_is_for(error: type[QuireError]) -> None:
    assert error.__doc__


def test_message_is_the_text() -> None:
    assert errors.ModelNotFoundError("no model 'x'").message == "no model 'x'"


def test_invalid_parameter_names_field_value_and_limit() -> None:
    error = InvalidParameterError("top_p", 1.5, "a number in (0, 1]")
    assert (error.field, error.value, error.limit) == ("top_p", 1.5, "a number in (0, 1]")
    assert error.message == "top_p must be a number in (0, 1], got 1.5"


def test_invalid_parameter_shortens_long_values_to_one_line() -> None:
    error = InvalidParameterError("stop", ["x\n" * 1000], "a list of strings")
    assert len(error.message) < 150
    assert "\n" not in error.message
    assert error.message.endswith("...")


def test_invalid_parameter_shows_what_python_cannot_write() -> None:
    error = InvalidParameterError("top_k", 10**5000, "smaller")
    assert error.message == "top_k must be smaller, got a int too long to show"


def test_invalid_parameter_reaches_another_process_whole() -> None:
    error = pickle.loads(pickle.dumps(InvalidParameterError("top_p", 1.5, "a number in (0, 1]")))
    assert (error.field, error.value, error.limit) == ("top_p", 1.5, "a number in (0, 1]")
    assert error.message == "top_p must be a number in (0, 1], got 1.5"


def test_nearest_suggests_only_what_is_close() -> None:
    assert nearest("temprature", ["temperature", "top_p"]) == " (did you mean 'temperature'?)"
    assert nearest("zzz", ["temperature", "top_p"]) == ""
    assert nearest("x", []) == ""
