"""Values of clients as plain Python data: objects with methods must not reach a chat template.

Next to read: `messages.py`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire.errors import ChatTemplateError

_NO_TEXT = re.compile("[\0\ud800-\udfff]")


def unicode_text(text: str) -> str:
    """Return the text with U+FFFD for each NUL character and each half of a surrogate pair.

    Output of programs may have them: bytes of a file, or a text that was cut off within a pair of UTF-16.
    """
    return _NO_TEXT.sub("\ufffd", text)


def plain(value: Any, name: str) -> Any:
    """Return a copy of JSON-like data in plain types. Raises: ChatTemplateError for other data, by `name`."""
    try:
        return msgspec.to_builtins(value, builtin_types=(bytes, bytearray), enc_hook=_plain_base)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(
            f"{name} cannot be passed to the chat template, which takes text, numbers, booleans, null, lists and "
            f"objects: {error}"
        ) from None


_BASES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (str, str.__str__), (int, int.__int__), (float, float.__float__), (Mapping, dict), (Sequence, list),
)  # fmt: skip
"""Types of plain data, and functions that make one of a subclass."""


def _plain_base(value: Any) -> Any:
    """Return a value of a subclass as one of its base class."""
    for base, make in _BASES:
        if isinstance(value, base):
            return make(value)
    raise TypeError(f"{type(value).__name__} is none of these")
