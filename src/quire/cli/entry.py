"""Where the `quire` command begins: a Ctrl-C before it can be handled ends the process without a traceback.

Imports nothing but the standard library's signals at its top. Next to read: `main.py`.
"""

import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> "NoReturn":
    """Entry point of the `quire` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from quire.cli.main import main as run

    run()
