"""Ctrl-C between steps: an interrupt inside a step would leave blocks and requests half updated.

Next to read: `llm.py`.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Hold a first Ctrl-C back until the yielded function is called; a second one interrupts at once.

    Does nothing outside the main thread, or where the program has its own handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    received = False

    def remember(signal_number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = True

    def check() -> None:
        if received:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
