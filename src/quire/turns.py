"""`Turns`: items that wait, of callers that take turns.

Not thread-safe. Next to read: `server/work.py` and `engine/process/preparation.py`, whose threads take the items.
"""

from collections import deque
from collections.abc import Callable, Container
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Turns(Generic[_T]):
    """Items by caller, the oldest first."""

    def __init__(self) -> None:
        self._items: dict[str, deque[_T]] = {}  # by caller, in the order of their turns

    def __bool__(self) -> bool:
        return bool(self._items)

    def add(self, caller: str, item: _T) -> None:
        """Add an item behind the caller's others."""
        self._items.setdefault(caller, deque()).append(item)

    def take(self, busy: Container[str] = ()) -> tuple[str, _T] | None:
        """Remove and return the next caller, none of `busy`, and its oldest item; None if there is none."""
        caller = next((caller for caller in self._items if caller not in busy), None)
        if caller is None:
            return None
        item = self._items[caller].popleft()
        self.end(caller)
        return caller, item

    def end(self, caller: str) -> None:
        """End the turn of a caller: its other items wait behind those of other callers."""
        if items := self._items.pop(caller, None):
            self._items[caller] = items

    def remove(self, is_meant: Callable[[_T], bool]) -> _T | None:
        """Remove and return the item that is meant; None if it does not wait."""
        for caller, items in self._items.items():
            for item in items:
                if is_meant(item):
                    items.remove(item)
                    if not items:
                        del self._items[caller]
                    return item
        return None
