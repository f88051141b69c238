"""A server of one's own for the time of a batch: `quire serve` on a free port of this machine, in a child process.

It ends with its parent, however that ends. Next to read: `batch.py`, `../server/run.py`.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from quire.config import EngineOptions
from quire.errors import EngineDeadError, QuireError

STOP_S = 10.0
STOPPED = "the server of the batch ended before it was ready"


@contextlib.contextmanager
def own_server(options: EngineOptions) -> Iterator[str]:
    """Yield the URL of a server of this model. Raises: ConfigError, ModelError, CapacityError, EngineDeadError."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(options, theirs), name="quire-batch-server")
    _start(process)
    theirs.close()
    try:
        yield _wait_for_url(ours)
    finally:
        # It serves nobody any more: no drain.
        ours.close()
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


def _start(process: BaseProcess) -> None:
    """Start it with Ctrl-C held back: on a terminal it comes to all processes, and this one imports for a while."""
    resource_tracker.ensure_running()  # which would let it through again, were it started below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_url(connection: Connection) -> str:
    try:
        found = connection.recv()
    except EOFError:
        raise EngineDeadError(STOPPED) from None
    if isinstance(found, QuireError):
        raise found
    assert isinstance(found, str)
    return found


def _serve(options: EngineOptions, connection: Connection) -> None:
    from quire.server.options import ServerOptions
    from quire.server.run import serve

    # Ctrl-C on the terminal is the parent's business: it writes what it has, then ends this.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that was held back is forgotten
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        serve(options, ServerOptions(port=0, drain_timeout_s=0), on_ready=connection.send)
    except QuireError as error:
        with contextlib.suppress(OSError):
            connection.send(error)


def _end_with(connection: Connection) -> None:
    """Stop when the parent closes its end, which its death does too."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os.kill(os.getpid(), signal.SIGTERM)
