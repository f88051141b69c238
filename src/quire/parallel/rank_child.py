"""Main program of the ranks above 0: `python -m quire.parallel.rank_child SOCKET MEMORY PARENT`.

SOCKET: a file descriptor, one end of a socket pair with rank 0. MEMORY: that of the memory that ranks share. PARENT:
the process id of rank 0. The process ends at once when rank 0 closes its end or dies.
Next to read: `rank_processes.py`, the other end.
"""

import ctypes
import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import msgspec

from quire.errors import EngineDeadError, EngineError, QuireError
from quire.parallel.frames import Failure, FrameReader, frame
from quire.parallel.rank_messages import FromRank, RankFailed, RankLoaded, StartRank, Step, ToRank

logger = logging.getLogger("quire.parallel")
RECEIVE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Entry point. Returns: the exit code."""
    connection, memory_fd, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    _end_with(connection, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.pop("QUIRE_TRACE", None)  # rank 0 traces
    if level := os.environ.get("QUIRE_LOGGING_LEVEL"):
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("quire").setLevel(level.upper())
    messages = _receive(connection)
    start = next(messages, None)
    if not isinstance(start, StartRank):
        return 0
    try:
        _serve(start, memory_fd, messages, connection)
    except EngineDeadError:
        return 0  # another rank is lost; rank 0 knows
    except Exception as error:
        logger.error("rank %d fails", start.rank, exc_info=error)
        if not isinstance(error, QuireError):
            error = EngineError(f"rank {start.rank} failed with {type(error).__name__}: {error}")
        _send(connection, RankFailed(Failure.of(error)))
        return error.exit_code
    return 0


def _end_with(connection: socket.socket, parent: int) -> None:
    """End this process as soon as rank 0 closes its end of the socket, or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)  # it died before
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)

    def watch() -> None:
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, name="quire-watch", daemon=True).start()


def _serve(start: StartRank, memory_fd: int, messages: Iterator[ToRank], connection: socket.socket) -> None:
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)  # before any thread of the libraries
    import numpy as np

    from quire import _native
    from quire.runtime.worker import Worker
    from quire.weights.checkpoint import Checkpoint, open_checkpoint

    config = start.config
    memory = np.frombuffer(mmap.mmap(memory_fd, start.memory_bytes), np.uint8)
    num_ranks, num_threads = config.options.tensor_parallel_size, config.threads_per_rank
    exchange = _native.Exchange(memory.ctypes.data, start.rank, num_ranks, num_threads, start.num_spins)
    if config.options.load_format == "dummy":
        checkpoint = Checkpoint(start.files, "", config.model.hf_config, {}, {}, {})
    else:
        checkpoint = open_checkpoint(start.files)
    runner = Worker(config, checkpoint, exchange=exchange).runner
    del checkpoint
    _send(connection, RankLoaded())
    for message in messages:
        assert isinstance(message, Step)
        runner.run(message.output)


def _receive(connection: socket.socket) -> Iterator[ToRank]:
    reader, decoder = FrameReader(), msgspec.msgpack.Decoder(ToRank)
    while data := connection.recv(RECEIVE_BYTES):
        yield from map(decoder.decode, reader.feed(data))


def _send(connection: socket.socket, message: FromRank) -> None:
    connection.sendall(frame(message))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
