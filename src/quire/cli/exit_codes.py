"""Exit codes of `quire`: a stable interface for scripts, printed in the command reference.

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


MEANINGS: dict[ExitCode, str] = {
    ExitCode.OK: "success (also when the reader of a pipe closed it early)",
    ExitCode.INTERNAL: "internal error: a bug in Quire; or the output cannot be written",
    ExitCode.USAGE: "usage: a bad command line, option or request",
    ExitCode.MODEL: "the model cannot be found, downloaded, read or computed",
    ExitCode.MEMORY: "it does not fit in memory",
    ExitCode.SERVER: "a server cannot be reached, refuses the key, or fails",
    ExitCode.CHECK_FAILED: "a check failed: `doctor` found a problem, `bench serve` exceeded a limit, `batch` has "
    "lines that failed, `compare` or `diff` got different outputs",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C (SIGINT); 0 if `serve` completed its requests first",
    ExitCode.TERMINATED: "terminated (SIGTERM); `serve` as above",
}
