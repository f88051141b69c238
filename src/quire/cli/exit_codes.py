"""Exit codes of `quire`: a stable interface for scripts, which `docs/cli.md` explains.

Errors choose theirs in `quire.errors`; this file only names them. Next to read: `main.py`.
"""

import enum


class ExitCode(enum.IntEnum):
    """The value of `$?` in a shell."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    MODEL = 3
    MEMORY = 4
    SERVER = 5
    CHECK_FAILED = 6
    INTERRUPTED = 130
    TERMINATED = 143
