"""`without_collections`: imports and loading without Python's garbage collector."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector away from imports and loading, and keep what they made from later collections.

    Little of it becomes garbage: looking for that meanwhile takes a tenth of the time, and each later look as much.
    """
    gc.disable()
    try:
        yield
        gc.freeze()  # reference cycles in it are never collected: after an error they would hold what was loaded
    finally:
        gc.enable()
