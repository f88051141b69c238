"""`FormCache`: what was made of forms, within a bound of bytes. Next to read: `compiler.py`, `form_checker.py`."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from quire.structured_outputs import StructuredOutputsParams

_T = TypeVar("_T")


class FormCache(Generic[_T]):
    """What was not asked for longest goes first. Not for several threads: its owner holds a lock."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        """Of all that is kept, at most `max_bytes`."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[StructuredOutputsParams, tuple[_T, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def values(self) -> Iterable[_T]:
        """All that is kept, oldest first."""
        return (value for value, _ in self._kept.values())

    def get(self, spec: StructuredOutputsParams) -> _T | None:
        """What was kept of a form. Mutates: it is the newest then."""
        found = self._kept.get(spec)
        if found is None:
            return None
        self._kept.move_to_end(spec)
        return found[0]

    def put(self, spec: StructuredOutputsParams, value: _T, size_bytes: int) -> None:
        """Keep something, unless there is something of this form. Mutates: the oldest go, all if it is too large."""
        if spec in self._kept:
            return
        self._kept[spec] = (value, size_bytes)
        self.num_bytes += size_bytes
        while self.num_bytes > self._max_bytes:
            _, (_, dropped_bytes) = self._kept.popitem(last=False)
            self.num_bytes -= dropped_bytes
