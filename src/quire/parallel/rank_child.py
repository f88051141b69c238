"""Main program of the ranks above 0: `python -m quire.parallel.rank_child SOCKET MEMORY PARENT`.

SOCKET: a file descriptor, one end of a socket pair with rank 0. MEMORY: that of the memory that the ranks of a plan
share. PARENT: the process id of rank 0. The process ends at once when rank 0 closes its end or dies; after `STOP` it
first writes the last blocks of its disk tier.
Next to read: `rank_processes.py`, the other end.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading

import msgspec

from quire.errors import EngineDeadError, EngineError, QuireError
from quire.garbage import without_collections
from quire.linux import end_with_parent, keep_to_cpus
from quire.logs import follow_environment
from quire.parallel.frames import FrameReader, SentError, frame
from quire.parallel.rank_messages import BlocksMoved, FromRank, RankFailed, RankLoaded, StartRank, Step

logger = logging.getLogger("quire.parallel")
RECEIVE_BYTES = 1 << 18


def main() -> int:
    """Entry point. Returns: the exit code."""
    connection, memory_fd, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.pop("QUIRE_TRACE", None)  # rank 0 traces
    start = _receive(connection)
    follow_environment(f"rank {start.rank}")
    is_stopping = threading.Event()
    threading.Thread(target=_watch, args=(connection, is_stopping), name="quire-watch", daemon=True).start()
    try:
        _serve(start, memory_fd, is_stopping, connection)
    except Exception as error:
        if not isinstance(error, EngineDeadError):  # which says that another rank is lost
            logger.error("rank %d fails", start.rank, exc_info=error)
        if not isinstance(error, QuireError):
            error = EngineError(f"rank {start.rank} failed with {type(error).__name__}: {error}")
        _send(connection, RankFailed(SentError.of(error)))
        return error.exit_code
    return 0


def end_with(parent: int) -> None:
    """Let the kernel kill this process as soon as its parent, which has this process id, ends."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(0)  # it died before


def _receive(connection: socket.socket) -> StartRank:
    """Return the first message of rank 0. Ends this process if rank 0 closes its end of the socket."""
    reader = FrameReader()
    while data := connection.recv(RECEIVE_BYTES):
        for message in reader.feed(data):
            return msgspec.msgpack.decode(message, type=StartRank)
    os._exit(0)


def _watch(connection: socket.socket, is_stopping: threading.Event) -> None:
    """Note `STOP`, or end this process as soon as rank 0 closes its end of the socket without it."""
    with contextlib.suppress(OSError):
        if connection.recv(1):
            return is_stopping.set()
    os._exit(0)


def _serve(start: StartRank, memory_fd: int, is_stopping: threading.Event, connection: socket.socket) -> None:
    if start.cpus:
        keep_to_cpus(start.cpus)  # before any thread of the libraries
    with without_collections():
        from quire.runtime.links import RankMemory
        from quire.runtime.shared_file import finish
        from quire.runtime.worker import Worker

        config, memory = start.config, RankMemory.of(start.config, memory_fd)
        if start.port:
            from quire.runtime.torch_group import join

            links = join(config, start.rank, start.port)
        else:
            links = memory.links(start.rank, start.num_spins)
        worker = Worker(config, start.open_checkpoint(), links=links)
    _send(connection, RankLoaded(worker.cache.stored_blocks))
    messages, decoder = memory.messages(start.num_spins)[start.rank - 1], msgspec.msgpack.Decoder(Step)
    while True:
        try:
            message = decoder.decode(messages.receive())
        except EngineDeadError:
            is_stopping.wait()  # without `STOP` rank 0 closes the socket, and `_watch` ends this process
            worker.cache.close()
            return finish()
        result = worker.follow(message.output, message.yielded, message.wanted)
        if result.transfers is not None:
            _send(connection, BlocksMoved(result.step_id, result.transfers))


def _send(connection: socket.socket, message: FromRank) -> None:
    with contextlib.suppress(ConnectionError):  # rank 0 may have closed its end
        connection.sendall(frame(message))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
