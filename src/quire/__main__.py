"""Entry point of `quire` and `python -m quire`: a Ctrl-C before `main` handles it ends the process without a traceback.

Imports only small modules of the standard library at its top. Next to read: `cli/main.py`.
"""

import gc
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> "NoReturn":
    """Run the command line of this process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()  # imports make no garbage: looking for it would be a tenth of their time, until the verb is imported
    from quire.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
