"""`Adapter`: a request's LoRA adapter in messages, and the form of the option `lora`.

Next to read: `engine/adapters.py`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import ConfigError


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter of a request: where its files are, and the SHA-256 of their content.

    `start`: the first position that is computed with it; those before are the base model's.
    """

    name: str
    path: str
    digest: str
    start: int = 0


def adapter_options(given: Any) -> tuple[str, ...]:
    """Return adapters as "NAME=PATH". Raises: ConfigError for another form, or a name given twice."""
    items = [f"{name}={path}" for name, path in given.items()] if isinstance(given, Mapping) else given
    if isinstance(items, str):
        items = (items,)
    names = []
    for item in items:
        name, _, path = item.partition("=") if isinstance(item, str) else ("", "", "")
        if not name or not path:
            raise ConfigError(f"lora={item!r} is not of the form NAME=PATH")
        names.append(name)
    if len(set(names)) < len(names):
        raise ConfigError(f"lora names {max(names, key=names.count)!r} twice: give each adapter a name of its own")
    return tuple(items)
