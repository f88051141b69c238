"""The package's log on stderr, from the level on that `QUIRE_LOGGING_LEVEL` names.

Debug lines of the loggers `quire.scheduler`, `quire.parallel` (the executor) and `quire.runtime` (the worker) follow
each step; events have the same texts as in a trace. Must not import logging at the top, for the sake of `quire --help`.
Next to read: `events.py`.
"""

import os
from typing import TYPE_CHECKING

from quire.errors import ConfigError, escaped

if TYPE_CHECKING:
    import logging

LEVEL_VARIABLE = "QUIRE_LOGGING_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LINE_FORMAT = "%(levelname)s %(name)s: %(message)s"


def level_of_environment() -> str:
    """Return the level that the environment names; "" if it names none. Raises: ConfigError."""
    level = os.environ.get(LEVEL_VARIABLE, "").upper()
    if level and level not in LOG_LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}={level!r} is not one of {', '.join(LOG_LEVELS)}")
    return level


def line_handler(source: str = "") -> "logging.Handler":
    """Return a handler that writes lines to stderr, control characters escaped. `source`: of them, such as a rank."""
    import logging

    class LineFormatter(logging.Formatter):
        def formatMessage(self, record: logging.LogRecord) -> str:
            return escaped(super().formatMessage(record))

    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(LINE_FORMAT.replace(":", f" {source}:" if source else ":")))
    return handler


def follow_environment(source: str = "") -> None:
    """Log to stderr if the environment names a level; handlers of a program that has some stay the only ones.

    `source`: of the lines, such as a rank. Mutates: the logger `quire`. Raises: ConfigError.
    """
    if level := level_of_environment():
        import logging

        logger = logging.getLogger("quire")
        if not logger.hasHandlers():
            logger.addHandler(line_handler(source))
        logger.setLevel(level)
