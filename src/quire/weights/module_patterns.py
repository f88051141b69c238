"""Values by patterns of module names, as PEFT's `rank_pattern` has them.

Python's `re` goes back and tries again, which takes hours for a short pattern such as `(.+)+$x`. pydantic has Rust's
regular expressions, whose time is linear in the name. Must not know adapters. Next to read: `adapter_files.py`.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from quire.errors import ModelFileError, printable

MAX_NAME_LEN = 1000
MAX_SECONDS = 1.0
"""Processor time for all patterns of a file. Names without special characters take none of it."""
_PLAIN = re.compile(r"[\w.-]+")


def values_of_modules(patterns: Mapping[str, float], modules: Collection[str]) -> dict[str, float]:
    """Return the value of the first pattern that each module's name matches, or that the end behind a dot does.

    Raises: ModelFileError for a pattern that takes too long, or is no regular expression of Rust's.
    """
    too_long = next((module for module in modules if len(module) > MAX_NAME_LEN), None)
    if too_long is not None:
        raise ModelFileError(f"'{printable(too_long, limit=80)}' is no module: the name has {len(too_long)} characters")
    if not patterns or not modules:
        return {}
    places = {pattern: place for place, pattern in enumerate(patterns)}
    first: dict[str, int] = {}
    for module in modules:
        if named := [places[end] for end in _ends(module) if end in places]:
            first[module] = min(named)
    end_s = time.thread_time() + MAX_SECONDS
    for pattern, place in places.items():
        if _PLAIN.fullmatch(pattern):
            continue
        matches = _matcher(pattern)
        for module in modules:
            if place < first.get(module, len(places)) and matches(module):
                first[module] = place
            if time.thread_time() > end_s:
                raise ModelFileError(f"the pattern '{printable(pattern, limit=80)}' takes too long: list the modules")
    values = [*patterns.values()]
    return {module: values[place] for module, place in first.items()}


def _ends(module: str) -> Iterator[str]:
    yield module
    yield from (module[place + 1 :] for place, character in enumerate(module) if character == ".")


def _matcher(pattern: str) -> Callable[[str], bool]:
    from typing import Annotated

    from pydantic import StringConstraints, TypeAdapter, ValidationError

    refusal = ModelFileError(
        f"'{printable(pattern, limit=80)}' is no pattern of modules: it is no regular expression, is too large, or"
        " looks around or back, which takes too long: list the modules"
    )
    if len(pattern) > MAX_NAME_LEN:
        raise refusal
    try:
        checker = TypeAdapter(Annotated[str, StringConstraints(pattern=rf"^(?:.*\.)?(?:{pattern})$")])
    except Exception:  # pydantic-core's SchemaError
        raise refusal from None

    def matches(module: str) -> bool:
        try:
            checker.validate_python(module)
        except ValidationError:
            return False
        return True

    return matches
