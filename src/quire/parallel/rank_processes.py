"""`RankProcesses`: starts the processes of the ranks above 0, sends them steps, and notices when one of them ends.

Steps go through shared memory. A socket to each rank carries its first message and what it reports, and tells each side
of the other's end.

One thread starts the processes and waits for their messages and their ends: the system kills them when that thread
ends, however it ends. The first failure of a rank ends all others. Next to read: `rank_child.py`, the other end.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.errors import EngineDeadError, QuireError
from quire.parallel.frames import FrameReader, frame
from quire.parallel.rank_messages import STOP, BlocksMoved, FromRank, RankFailed, RankLoaded, StartRank, Step
from quire.runtime.hardware import cpus_of_ranks
from quire.runtime.links import ONE_RANK, RankMemory, spins_of
from quire.weights.sources import ModelFiles

logger = logging.getLogger("quire.parallel")
RECEIVE_BYTES = 1 << 16
KILL_AFTER_S = 5.0


class _RankProcess:
    """The process of one rank, and our end of its socket."""

    def __init__(self, rank: int, memory_fd: int) -> None:
        """Start the process. Raises: OSError if memory or files are short."""
        self.rank = rank
        self.loaded: RankLoaded | None = None
        self.has_lost_others = False
        self.connection, theirs = socket.socketpair()
        self.reader, self.decoder = FrameReader(), msgspec.msgpack.Decoder(FromRank)
        with theirs:
            numbers = [str(number) for number in (theirs.fileno(), memory_fd, os.getpid())]
            command = [sys.executable, "-P", "-m", "quire.parallel.rank_child", *numbers]
            try:
                # With a session of its own it gets no interrupt that is typed at the terminal.
                self.process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno(), memory_fd], stdin=subprocess.DEVNULL, start_new_session=True
                )
            except OSError:
                self.connection.close()
                raise

    def hang_up(self) -> None:
        """Make the process end: it watches the socket."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def reap(self) -> int:
        """Wait for the end of the process, which was told to end. Returns: its status."""
        try:
            return self.process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Ranks:
    """Ranks above 0, wherever they are: the first failure of one ends all others."""

    def __init__(self) -> None:
        self._failure: QuireError | None = None
        self._tell: Callable[[EngineDeadError], None] | None = None
        self._is_stopping = False
        self._moved: list[BlocksMoved] = []
        self._changed = threading.Condition()

    def check(self) -> None:
        """Raises: EngineDeadError, with the first failure of a rank, or after `stop`."""
        if self._failure is not None:
            raise EngineDeadError(self._failure.message)
        if self._is_stopping:
            raise EngineDeadError("the executor was shut down; build a new engine")

    def fail(self, failure: QuireError) -> None:
        """Note the first failure; all ranks end, and calls that wait for them return."""
        with self._changed:
            is_first, tell = self._failure is None, self._tell
            if is_first:
                self._failure = failure
            self._changed.notify_all()
        self._end_all()
        if is_first and tell is not None:
            tell(EngineDeadError(failure.message))

    def await_failure(self) -> None:
        """Wait a while for the failure that made rank 0 fail: a connection breaks before the end is noticed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, KILL_AFTER_S)

    def watch(self, tell: Callable[[EngineDeadError], None]) -> None:
        """Call `tell` with the first failure, in any thread; at once if there was one."""
        with self._changed:
            self._tell, failure = tell, self._failure
        if failure is not None:
            tell(EngineDeadError(failure.message))

    @property
    def stored_blocks(self) -> list[set[tuple[int, bytes]]]:
        """Of each rank, cache group and digest of the blocks that its disk tier held when it was loaded."""
        return []

    def note_moved(self, message: BlocksMoved) -> None:
        """Keep a message of a rank for `take_moved`. For any thread."""
        with self._changed:
            self._moved.append(message)
            self._changed.notify_all()

    def take_moved(self, wait_s: float) -> list[BlocksMoved]:
        """Return the messages about transfers since the last call; waits up to `wait_s` for the first."""
        with self._changed:
            if wait_s:
                self._changed.wait_for(lambda: bool(self._moved) or self._failure is not None, wait_s)
            moved, self._moved = self._moved, []
        return moved

    def finish(self) -> None:
        """Let the ranks write the last blocks of their disk tiers; `stop` waits until they have."""

    def _end_all(self) -> None:
        """Tell all ranks to end."""
        raise NotImplementedError


class RankProcesses(Ranks):
    """Ranks 1 … N - 1, and what connects all ranks: memory for those of a plan, else a `TorchGroup`.

    Attributes: `links`: those of rank 0; `cpus`: those of rank 0; empty: any.
    """

    def __init__(self, config: EngineConfig, files: ModelFiles) -> None:
        """Start the processes, which load their shares of the model. Raises: EngineDeadError if one cannot start."""
        super().__init__()
        self._num_ranks = config.num_ranks
        self._owner = os.getpid()
        cpus = cpus_of_ranks(self._num_ranks)
        self.cpus = cpus[0]
        num_spins = spins_of(self._num_ranks * config.threads_per_rank)
        self._memory = RankMemory.of(config)
        self.links, port = self._memory.links(0, num_spins), 0
        self._messages = self._memory.messages(num_spins)
        self._store: Any = None
        if not config.uses_plan:
            from quire.runtime.torch_group import make_store

            self.links, self._store = ONE_RANK, make_store()
            port = self._store.port
        self._ranks: list[_RankProcess] = []
        self._lost: QuireError | None = None
        self._thread = threading.Thread(target=self._start_and_watch, name="quire-ranks", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._ranks) == self._num_ranks - 1 or self._failure is not None)
        self.check()
        path = str(files.path.absolute())
        for item in self._ranks:
            start = StartRank(
                item.rank, config.on_rank(item.rank), cpus[item.rank], num_spins, path, files.kind, files.name, port
            )
            try:
                item.connection.sendall(frame(start))
            except OSError:
                self._thread.join()  # it says how the process ended
                self.check()
        if port:
            # Not by this thread, which a rank that ends before it has joined must not hold up.
            threading.Thread(target=self._join, args=(config, port), name="quire-join", daemon=True).start()
            with self._changed:
                self._changed.wait_for(lambda: self.links.group is not None or self._failure is not None)
            self._raise_failure()

    def wait_until_loaded(self) -> None:
        """Raises: the error that loading raised in a rank; EngineDeadError if a process ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or all(item.loaded for item in self._ranks))
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.stop()
            raise self._failure

    def _join(self, config: EngineConfig, port: int) -> None:
        from quire.runtime.torch_group import join

        try:
            links = join(config, 0, port)
        except QuireError as error:
            self.fail(error)
            return
        with self._changed:
            self.links = links
            self._changed.notify_all()

    def send(self, step: Step) -> None:
        """Send a step to all ranks. Raises: EngineDeadError if a rank is lost."""
        self.check()
        data = msgspec.msgpack.encode(step)
        for channel in self._messages:
            channel.send(data)

    @property
    def stored_blocks(self) -> list[set[tuple[int, bytes]]]:
        """See `Ranks`."""
        return [item.loaded.stored for item in self._ranks if item.loaded is not None]

    def finish(self) -> None:
        """See `Ranks`."""
        if self._is_stopping or self._failure is not None or os.getpid() != self._owner:
            return
        self._is_stopping = True
        for item in self._ranks:
            with contextlib.suppress(OSError):
                item.connection.sendall(STOP)

    def stop(self) -> None:
        """End the processes; returns when they have ended. A second call does nothing."""
        if os.getpid() != self._owner:
            return  # a copy of the engine's process that shares its sockets
        self._is_stopping = True
        self._end_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _end_all(self) -> None:
        self._memory.give_up()
        if self.links.group is not None:
            self.links.group.give_up()
        self._store = None  # ends `_join` if it waits there for a rank
        for item in self._ranks:
            item.hang_up()

    # --- The thread -----------------------------------------------------------------------

    def _start_and_watch(self) -> None:
        try:
            for rank in range(1, self._num_ranks):
                item = _RankProcess(rank, self._memory.fd)
                with self._changed:
                    self._ranks.append(item)
                    self._changed.notify_all()
            self._watch()
        except OSError as error:
            self.fail(EngineDeadError(f"a rank's process cannot be started: {error.strerror or error}"))
        finally:
            self._end_all()
            for item in self._ranks:
                item.reap()
                item.connection.close()

    def _watch(self) -> None:
        """Take messages until a rank fails or all are told to end.

        A rank that has lost another one is not at fault: the end of that one, which may be noticed later, is the cause.
        """
        with selectors.DefaultSelector() as selector:
            for item in self._ranks:
                selector.register(item.connection, selectors.EVENT_READ, item)
            while not self._is_stopping and self._failure is None:
                found = selector.select(KILL_AFTER_S if self._lost else None)
                for key, _ in found:
                    self._take(key.data)
                    if key.data.has_lost_others:
                        selector.unregister(key.fileobj)
                if self._lost and not (found and selector.get_map()):
                    self.fail(self._lost)

    def _take(self, item: _RankProcess) -> None:
        with contextlib.suppress(ConnectionError):
            if data := item.connection.recv(RECEIVE_BYTES):
                for message in map(item.decoder.decode, item.reader.feed(data)):
                    if isinstance(message, RankFailed):
                        failure = message.failure.revive()
                        if isinstance(failure, EngineDeadError):
                            self._lost, item.has_lost_others = failure, True
                        else:
                            self.fail(failure)
                    elif isinstance(message, BlocksMoved):
                        self.note_moved(message)
                    else:
                        with self._changed:
                            item.loaded = message
                            self._changed.notify_all()
                return
        if not self._is_stopping and self._failure is None:
            self.fail(EngineDeadError(f"rank {item.rank} of {self._num_ranks} {_describe(item.reap())}"))


def _describe(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name} ({-status}){hint}"
