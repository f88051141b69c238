"""`typed_keys`: the keys that are typed on a terminal, one by one. Next to read: `top.py`."""

import codecs
import contextlib
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

END = "\x04"
"""The key Ctrl-D, and the end of the input."""
ESCAPE = "\x1b"
_KEY = re.compile(r"\x1b(?:\[[\d;]*[ -~]|O.)?|.", re.DOTALL)
ReadKey = Callable[[float | None], str | None]
"""Waits for a key, at most some seconds, and returns it in lower case, or None. After the end of input: `END`."""


@contextlib.contextmanager
def typed_keys() -> Iterator[ReadKey]:
    """Yield what reads keys. Those that were typed before are not lost.

    A key that sends several characters, such as an arrow, is `ESCAPE`. Without a terminal no key comes.
    """
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    typed: deque[str] = deque()

    def read(seconds: float | None) -> str | None:
        end_s = None if seconds is None else time.monotonic() + seconds
        while not typed:
            if not select.select([file], [], [], None if end_s is None else max(0.0, end_s - time.monotonic()))[0]:
                return None
            piece = os.read(file, 64)
            typed.extend(_KEY.findall(decoder.decode(piece) if piece else END))
        key = typed.popleft()
        return ESCAPE if key.startswith(ESCAPE) else key.lower()

    before = termios.tcgetattr(file)
    tty.setcbreak(file, termios.TCSADRAIN)
    try:
        yield read
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _no_key(seconds: float | None) -> str | None:
    if seconds is None:
        return END
    time.sleep(seconds)
    return None
