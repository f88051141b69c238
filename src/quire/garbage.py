"""`without_collections`: imports, loading and large requests without Python's garbage collector."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector away from imports and loading, and keep what they made from later collections.

    Little of it becomes garbage: looking for that meanwhile takes a tenth of the time, and each later look as much.
    """
    with collections_paused():
        yield
        gc.freeze()  # reference cycles in it are never collected: after an error they would hold what was loaded


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Keep the garbage collector away while something large is made."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
