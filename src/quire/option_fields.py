"""Fields of option classes: `option` makes one with its help text and limits, `check_options` checks the values.

Next to read: `config.py`.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import field, fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from quire.errors import ConfigError


def option(
    default: Any,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    group: str = "engine",
    low: float = 1,
    high: float = math.inf,
) -> Any:
    """A field of `EngineOptions` with its help text, choices and help group; a number's limits, both included."""
    return field(default=default, metadata={"help": text, "choices": choices, "group": group, "limits": (low, high)})


_KINDS: dict[Any, tuple[Any, str]] = {
    str: (str, "text"),
    bool: (bool, "true or false"),
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    Mapping: (Mapping, "a mapping"),
}
"""By type of a field: the classes of its values, and their name."""


def check_options(options: Any) -> None:
    """Check a dataclass of `option` fields. Raises: ConfigError on a wrong type, or outside a field's limits."""
    hints = _type_hints(type(options))  # type: ignore[arg-type]  # a class can be hashed
    for item in fields(options):
        value, (low, high), choices = getattr(options, item.name), item.metadata["limits"], item.metadata["choices"]
        kinds = get_args(hints[item.name]) if isinstance(hints[item.name], UnionType) else (hints[item.name],)
        kind = get_origin(kinds[0]) or kinds[0]
        if kind not in _KINDS or (value is None and len(kinds) > 1):
            continue
        classes, wanted = _KINDS[kind]
        good = isinstance(value, classes) and (kind is bool or not isinstance(value, bool))
        if kind in (int, float):
            good = good and low <= value <= high and abs(value) < math.inf
            at_least = f" of at least {low}" if low > -math.inf else ""
            wanted += at_least if high == math.inf else f" in {low} … {high}"
        elif len(kinds) > 1:
            wanted += " or None"
        if not good:
            raise ConfigError(f"{item.name}={value!r} is not {wanted}")
        if choices and value not in choices:
            raise ConfigError(f"{item.name}={value!r} is not one of {', '.join(choices)}")


_type_hints = functools.cache(get_type_hints)
