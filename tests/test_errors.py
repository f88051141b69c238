import inspect
import pickle

from quire import errors
from quire.errors import InvalidParameterError, QuireError, nearest

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if issubclass(item, QuireError)]


def test_codes_and_statuses_are_stable() -> None:
    # Clients match on these: a change here is a breaking change.
    assert {item.__name__: (item.code, item.http_status, item.exit_code) for item in CLASSES} == {
        "QuireError": ("internal_error", 500, 1),
        "ConfigError": ("invalid_option", 400, 2),
        "MissingExtraError": ("missing_extra", 400, 2),
        "InstallationError": ("installation", 400, 2),
        "RequestError": ("invalid_request", 400, 2),
        "InvalidParameterError": ("invalid_parameter", 400, 2),
        "PromptError": ("invalid_prompt", 400, 2),
        "ContextLengthError": ("context_length_exceeded", 400, 2),
        "ChatTemplateError": ("chat_template_error", 400, 2),
        "DuplicateRequestError": ("duplicate_request_id", 400, 2),
        "ModelError": ("model_error", 404, 3),
        "ModelNotFoundError": ("model_not_found", 404, 3),
        "DownloadError": ("download_failed", 404, 3),
        "ModelFileError": ("model_file_invalid", 404, 3),
        "UnsupportedModelError": ("model_unsupported", 404, 3),
        "CapacityError": ("capacity", 503, 4),
        "MemoryCapacityError": ("out_of_memory", 503, 4),
        "QueueFullError": ("queue_full", 429, 4),
        "QueueTimeoutError": ("queue_timeout", 503, 4),
        "DeadlineError": ("deadline_passed", 504, 4),
        "UnreadError": ("reader_too_slow", 503, 4),
        "ComparisonError": ("outputs_differ", 500, 6),
        "EngineError": ("engine_error", 500, 1),
        "EngineDeadError": ("engine_dead", 500, 1),
    }


def test_invalid_parameter_names_field_value_and_limit_in_another_process_too() -> None:
    error = InvalidParameterError("top_p", 1.5, "a number in (0, 1]")
    for item in (error, pickle.loads(pickle.dumps(error))):
        assert (item.field, item.value, item.limit) == ("top_p", 1.5, "a number in (0, 1]")
        assert item.message == "top_p must be a number in (0, 1], got 1.5"


def test_invalid_parameter_shortens_long_values_to_one_line() -> None:
    error = InvalidParameterError("stop", ["x\n" * 1000], "a list of strings")
    assert len(error.message) < 150
    assert "\n" not in error.message
    assert error.message.endswith("...")


def test_invalid_parameter_shows_what_python_cannot_write() -> None:
    error = InvalidParameterError("top_k", 10**5000, "smaller")
    assert error.message == "top_k must be smaller, got a int too long to show"


def test_nearest_suggests_only_what_is_close() -> None:
    assert nearest("temprature", ["temperature", "top_p"]) == " (did you mean 'temperature'?)"
    assert nearest("zzz", ["temperature", "top_p"]) == ""
    assert nearest("x", []) == ""
