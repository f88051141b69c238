"""`Budget`: processor time and memory of one rendering of a chat template, and the sizes of its values.

Operators, filters and methods run in C, where no clock is checked: one of them could compute for hours or fill the
memory. So the size of each result is estimated before it is made, and counted when it is there. Must not know the
environment of templates. Next to read: `template_functions.py`, which estimates.
"""

import operator
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2

MAX_CHARACTERS = 4 * 2**20
"""Most characters of a rendered chat, and of a text that a template makes: a request has no more."""
MAX_SIZE = 2 * MAX_CHARACTERS
"""Largest size of a list, tuple or object that a template makes, as `Budget.size` counts it."""
MAX_ITEMS = 100_000
"""Most items that a filter walks through, as many as Jinja2's `range` has in its sandbox."""
MAX_DEPTH = 100
"""Levels of a list. Python hashes nested tuples without a check of its stack."""
MAX_BYTES = 64 * 2**20
"""Most bytes of all values that one rendering makes. A chat of 1 MiB takes 4 to 15 MiB."""
MAX_SECONDS = 0.25
"""Processor time of a rendering, so that a busy machine fails none. 2,048 messages take 0.03 s, measured."""
MAX_INTEGER_BITS = 4096
ITEM_SIZE = 32
"""Size of an item beside its own characters."""
_BYTES_PER_STEP = 64
"""Memory for the small values of a step, which are not counted one by one."""
_STEPS_PER_CLOCK_CHECK = 64
"""Reading the clock of a thread is a system call."""
_CHARACTERS_PER_STEP = 4096
_CONTAINERS = (list, tuple, dict)
_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))


class TemplateLimitError(jinja2.TemplateError):
    """The template takes too much time, or makes a value that is too large."""


class Budget:
    """Time and memory of one rendering. Every method that counts raises TemplateLimitError at a limit."""

    def __init__(self) -> None:
        self._start_s = time.thread_time()
        self._num_steps = self._next_check = 0
        self._num_bytes = 0
        self._measured: dict[int, tuple[int, int]] = {}
        self._kept: list[Any] = []

    def step(self, num_steps: int = 1) -> None:
        """Count the work of loop iterations, calls and large values."""
        self._num_steps += num_steps
        if self._num_steps >= self._next_check:
            self._check()

    def admit(self, size: int, most: int = MAX_CHARACTERS) -> None:
        """Refuse a value before it is made, and count the work. `size`: of the result at most."""
        if size > most:
            raise TemplateLimitError(f"it makes a value of {size} characters or items, more than {most}")
        self._num_steps += 1 + size // _CHARACTERS_PER_STEP
        if self._num_steps >= self._next_check or self._num_bytes + size > MAX_BYTES:
            self._check(size)

    def admit_integer(self, num_bits: int) -> None:
        """Refuse an integer of `num_bits`."""
        if num_bits > MAX_INTEGER_BITS:
            raise TemplateLimitError(f"it computes an integer of {num_bits} bits, more than {MAX_INTEGER_BITS}")

    def keep(self, value: Any) -> Any:
        """Count a value that was made, and return it."""
        if type(value) is not str:
            if isinstance(value, _CONTAINERS):
                size, depth = self._measure(value)
                if depth > MAX_DEPTH:
                    raise TemplateLimitError(f"it makes a list or object of {depth} levels, more than {MAX_DEPTH}")
                self.admit(size, MAX_SIZE)
            elif isinstance(value, int) and value.bit_length() > 64:
                self.admit_integer(value.bit_length())
            else:
                return value
        self._num_bytes += sys.getsizeof(value)
        return value

    def size(self, value: Any) -> int:
        """Return about how many characters a value has when it is printed, and `ITEM_SIZE` for each item in it.

        A list that is in a value several times counts several times: printing and comparing it take that long.
        """
        kind = type(value)
        if kind is str or kind is bytes:
            return len(value)
        if kind is int:
            return 1 + int(value.bit_length() // 3)
        if isinstance(value, _CONTAINERS):
            return self._measure(value)[0]
        if isinstance(value, _VIEWS):
            return self._measure(list(value))[0]
        return ITEM_SIZE

    def text(self, value: Any) -> str:
        """Return a value as it is printed."""
        if type(value) is str:
            return value
        size = self.size(value)
        if size <= ITEM_SIZE:
            self.step()
            return str(value)
        self.admit(4 * size)  # Python escapes characters that do not print
        return str(self.keep(str(value)))

    def listed(self, values: Iterable[Any]) -> Sequence[Any]:
        """Return the items of a value: itself, if it is a list."""
        num_items = operator.length_hint(values, -1)
        if num_items > MAX_ITEMS:
            raise TemplateLimitError(f"it walks through {num_items} items, more than {MAX_ITEMS}")
        if isinstance(values, list | tuple):
            return values
        items = list(values) if num_items >= 0 else list(self._counted(values))
        self.keep(items)
        return items

    def joined(self, pieces: Iterable[str]) -> str:
        """Return a text of pieces that are made one by one."""
        taken, num_characters = [], 0
        for piece in pieces:
            self.step()
            num_characters += len(piece)
            if num_characters > MAX_CHARACTERS:
                raise TemplateLimitError(f"it writes more than {MAX_CHARACTERS} characters; send shorter messages")
            taken.append(piece)
        return self.concatenated("", taken)

    def concatenated(self, separator: str, texts: Sequence[str]) -> str:
        """Return texts as one text."""
        self.admit(sum(map(len, texts)) + len(separator) * len(texts))
        return str(self.keep(separator.join(texts)))

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for index, value in enumerate(values):
            self.step()
            if index == MAX_ITEMS:
                raise TemplateLimitError(f"it walks through more than {MAX_ITEMS} items")
            yield value

    def _check(self, size: int = 0) -> None:
        self._next_check = self._num_steps + _STEPS_PER_CLOCK_CHECK
        if time.thread_time() - self._start_s > MAX_SECONDS:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} s of processor time")
        if self._num_bytes + _BYTES_PER_STEP * self._num_steps + size > MAX_BYTES:
            raise TemplateLimitError(f"it makes values of more than {MAX_BYTES} bytes together")

    def _measure(self, value: Any) -> tuple[int, int]:
        """Return size and depth of a list or object. It is kept, so that no other one gets its id."""
        known = self._measured.get(id(value))
        if known is not None:
            return known
        size, depth = ITEM_SIZE, 1
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            if isinstance(item, _CONTAINERS):
                item_size, item_depth = self._measure(item)
                size, depth = size + item_size, max(depth, item_depth + 1)
            else:
                size += len(item) if type(item) is str else self.size(item)
            size += ITEM_SIZE
        self.step(1 + len(value) // 8)
        self._measured[id(value)] = size, depth
        self._kept.append(value)
        return size, depth


_budget: ContextVar[Budget] = ContextVar("budget")
current = _budget.get
"""Returns the budget of the rendering that runs."""


@contextmanager
def new_budget() -> Iterator[Budget]:
    """Make a budget the current one."""
    budget = Budget()
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)
