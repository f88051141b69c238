"""Errors that Quire raises on purpose: one tree under `QuireError`, with the HTTP status and exit code of each.

A message says what is wrong, which value, which limit, and the next step, in one line.
Next to read: `config.py`, where most `ConfigError`s come from.
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

_ABOVE_SPACE = r"\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
CONTROL = re.compile(rf"[\x00-\x1f{_ABOVE_SPACE}]")
_CONTROL_BUT_LINES = re.compile(rf"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f{_ABOVE_SPACE}]")
MAX_MESSAGE_LEN = 10_000
"""Characters of a message that has values of files of a model; names of models may be long, too."""

MAX_NAME_LEN = 200
"""Characters of a name that is compared with known ones: the time grows with their square."""


class QuireError(Exception):
    """Base of all errors raised on purpose. `code` is stable and machine-readable."""

    code: str = "internal_error"
    http_status: int = 500
    exit_code: int = 1

    @property
    def message(self) -> str:
        """The text without the class name."""
        return str(self)


class ConfigError(QuireError):
    """An engine option is unknown, has a bad value, or contradicts another."""

    code = "invalid_option"
    http_status = 400
    exit_code = 2


class MissingExtraError(ConfigError):
    """A package that a request needs is not installed; the message has the command that installs it."""

    code = "missing_extra"


class InstallationError(ConfigError):
    """An installed package brings a verb and cannot be imported."""

    code = "installation"


class RequestError(QuireError):
    """A request is wrong; the engine and all other requests are unaffected."""

    code = "invalid_request"
    http_status = 400
    exit_code = 2


class InvalidParameterError(RequestError):
    """A field of `SamplingParams`, `PoolingParams` or `BeamSearchParams` has a bad value."""

    code = "invalid_parameter"

    def __init__(self, field: str, value: Any, limit: str) -> None:
        """`limit` completes the sentence "`field` must be …"."""
        self.field = field
        self.value = value
        self.limit = limit
        super().__init__(f"{field} must be {limit}, got {_shorten(value)}")

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled with its message alone, and crossing to another process would fail.
        return type(self), (self.field, self.value, self.limit)


class PromptError(RequestError):
    """The prompt is empty, of the wrong type, or has token ids outside the vocabulary."""

    code = "invalid_prompt"


class ContextLengthError(RequestError):
    """The prompt leaves no room in the context."""

    code = "context_length_exceeded"


class ChatTemplateError(RequestError):
    """There is no chat template, it does not parse, or it raised on these messages."""

    code = "chat_template_error"


class DuplicateRequestError(RequestError):
    """A request with this id is still running."""

    code = "duplicate_request_id"


class ModelError(QuireError):
    """The model cannot be found, fetched, read or computed. Values of its files are shown, in one printable line."""

    code = "model_error"
    http_status = 404
    exit_code = 3

    def __init__(self, message: object) -> None:
        super().__init__(printable(str(message), limit=MAX_MESSAGE_LEN))


class ModelNotFoundError(ModelError):
    """No alias, path or hub id of this name."""

    code = "model_not_found"


class DownloadError(ModelError):
    """A download failed, or what arrived has the wrong checksum."""

    code = "download_failed"


class ModelFileError(ModelError):
    """A model file is truncated, corrupted, or contradicts itself."""

    code = "model_file_invalid"


class UnsupportedModelError(ModelError):
    """The files are valid, but computing them here would be wrong or is not implemented."""

    code = "model_unsupported"


class CapacityError(QuireError):
    """Memory, the queue or another resource has no room, for now or at all."""

    code = "capacity"
    http_status = 503
    exit_code = 4


class MemoryCapacityError(CapacityError):
    """Weights, KV cache or one request exceed the memory; the message says what would fit."""

    code = "out_of_memory"


class QueueFullError(CapacityError):
    """The waiting queue is full."""

    code = "queue_full"
    http_status = 429


class QueueTimeoutError(CapacityError):
    """A request waited too long to be computed."""

    code = "queue_timeout"


class DeadlineError(CapacityError):
    """A request was not complete when the seconds of its `deadline_s` had passed."""

    code = "deadline_passed"
    http_status = 504

    def __init__(self) -> None:
        super().__init__(
            "the answer was not complete within the request's deadline_s: ask for fewer tokens, or allow more seconds"
        )


class UnreadError(CapacityError):
    """A client left more of its answer unread than the server keeps."""

    code = "reader_too_slow"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"more than {limit} bytes of this answer waited to be read: read faster, ask for fewer "
            "log-probabilities, or do not stream"
        )


class ComparisonError(QuireError):
    """Two modes of one engine gave different outputs where they must be equal."""

    code = "outputs_differ"
    exit_code = 6


class EngineError(QuireError):
    """An internal invariant broke; this is a bug in Quire."""

    code = "engine_error"


class EngineDeadError(EngineError):
    """The engine loop stopped; requests in flight failed with this error."""

    code = "engine_dead"


def printable(text: str, *, limit: int = 300) -> str:
    """Return foreign text for one line of a message, as `escaped` shows it, and at most `limit` characters of it."""
    return escaped(text[:limit]) + ("" if len(text) <= limit else "…")


def escaped(text: str, *, keeps_lines: bool = False) -> str:
    """Return foreign text for a terminal: control characters and changes of direction as escapes, such as `\\x1b`.

    They move the cursor, hide text, or fill the clipboard. `keeps_lines`: tabs and line ends stay.
    """
    pattern = _CONTROL_BUT_LINES if keeps_lines else CONTROL
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest known name, or an empty string."""
    found = difflib.get_close_matches(name[:MAX_NAME_LEN], list(known), n=1)
    return f" (did you mean '{found[0]}'?)" if found else ""


def _shorten(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= 80 else text[:77] + "..."
