"""Log format of the server: one line per record, as text or JSON, with control characters escaped.

A record's `fields` (given as `extra={"fields": {...}}`) become `name=value`, or members of the JSON object.
Next to read: `gate.py`, which writes one line per request.
"""

import datetime
import json
import logging
import re
from typing import Any

from quire.errors import escaped

MAX_VALUE_CHARACTERS = 300
_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")


def use_format(log_format: str) -> None:
    """Make the handlers of Quire's log write "text" or "json". Mutates: the logger `quire`."""
    for handler in logging.getLogger("quire").handlers:
        handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())


class TextFormatter(logging.Formatter):
    """`INFO quire.access: request method=GET path=/version status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line, and below it the traceback if there is one."""
        parts = [f"{record.levelname} {record.name}: {escaped(record.getMessage())}"]
        parts += [f"{name}={shown(value)}" for name, value in fields_of(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per record, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        content: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in fields_of(record).items():
            content.setdefault(name, value[:MAX_VALUE_CHARACTERS] if isinstance(value, str) else value)
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the `fields` of a record, or nothing."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def shown(value: object) -> str:
    """Return a value as text, quoted where it is not plain."""
    if not isinstance(value, str):
        return str(value)
    text = value[:MAX_VALUE_CHARACTERS]
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
