"""`GrammarThread`: prepares requests with grammars beside the steps and beside all other requests.

Compiling a large grammar takes a second, in which the receiving thread would take no other client's request and no
abort. Next to read: `child.py`, `grammar/compiler.py`.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from quire.engine.process.messages import Submit
from quire.errors import EngineDeadError
from quire.turns import Turns

ROOM_CHECK_S = 0.005
"""Requests start between steps."""


class GrammarThread:
    """Thread that prepares one request at a time; clients take turns. It starts with the first request."""

    def __init__(
        self, prepare: Callable[[Submit], None], has_room: Callable[[], bool], abort: Callable[[str], None]
    ) -> None:
        """`prepare` is called with each request once `has_room` allows it, `abort` with the id of one that was dropped
        meanwhile."""
        self._prepare, self._has_room, self._abort = prepare, has_room, abort
        self._changed = threading.Condition()
        self._waiting = Turns[Submit]()
        self._running_id: str | None = None
        self._is_dropped = False
        self._thread: threading.Thread | None = None

    def add(self, message: Submit) -> None:
        """Prepare a request when its client has its turn."""
        with self._changed:
            self._waiting.add(message.spec.client_id, message)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="quire-prepare", daemon=True)
                self._thread.start()

    def drop(self, request_id: str) -> bool:
        """Forget a request that is not prepared yet; return False if there is none of this id."""
        with self._changed:
            if request_id == self._running_id:
                self._is_dropped = True
                return True
            return self._waiting.remove(lambda message: message.spec.request_id == request_id) is not None

    def _work(self) -> None:
        with suppress(EngineDeadError):  # its requests are told
            while True:
                self._prepare_next()

    def _prepare_next(self) -> None:
        with self._changed:
            while not self._waiting:
                self._changed.wait()
            while not self._has_room():
                self._changed.wait(ROOM_CHECK_S)
            if (taken := self._waiting.take()) is None:
                return  # it was dropped meanwhile
            client_id, message = taken
            request_id = self._running_id = message.spec.request_id
            self._is_dropped = False
        self._prepare(message)
        with self._changed:
            self._running_id = None
            self._waiting.end(client_id)
            is_dropped = self._is_dropped
        if is_dropped:
            self._abort(request_id)
