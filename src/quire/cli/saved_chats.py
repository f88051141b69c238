"""Chats saved by name: one JSON file each, a list of messages as in OpenAI's API, in the user's data directory.

Only this user may read them. `XDG_DATA_HOME` moves the directory. Next to read: `chat.py`.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, nearest
from quire.files import make_directory, read_own, replace_file

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", re.ASCII)


def directory() -> Path:
    """Return the directory of the files, which may not exist yet."""
    import platformdirs

    return Path(platformdirs.user_data_dir("quire", appauthor=False)) / "chats"


def names() -> list[str]:
    """Return the names of all saved chats, the newest first."""
    with contextlib.suppress(OSError):
        files = sorted(directory().glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        return [path.stem for path in files]
    return []


def save(name: str, messages: Sequence[dict[str, Any]]) -> Path:
    """Write a chat in place of one with the same name. Returns: its file. Raises: ConfigError."""
    path = _path(name)
    try:
        make_directory(path.parent)
        replace_file(path, [json.dumps(list(messages), ensure_ascii=False, indent=1).encode()])
    except OSError as error:
        raise ConfigError(f"the chat cannot be saved as {path}: {error.strerror}") from error
    return path


def load(name: str) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises: ConfigError if there is none, or its file holds no list of messages."""
    path = _path(name)
    try:
        messages = json.loads(read_own(path))
    except FileNotFoundError:
        known = names()
        saved = f"saved are {', '.join(known)}" if known else "none is saved; /save NAME saves one"
        raise ConfigError(f"there is no saved chat '{name}'{nearest(name, known)}; {saved}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise ConfigError(f"{path} is not a list of messages such as {{'role': 'user', 'content': 'hi'}}")
    return messages


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"'{name}' cannot name a chat: use letters, digits, '-', '_' and '.'")
    return directory() / f"{name}.json"


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str if not message.get("tool_calls") else str | None)
    )
