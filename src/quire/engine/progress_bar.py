"""The progress bar of `LLM.generate`: finished prompts and tokens per second, on stderr.

Next to read: `llm.py`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

UseTqdm = bool | Callable[..., Any]
"""True or False, or a function with tqdm's arguments that makes a progress bar."""


class ProgressBar:
    """Counter of finished prompts and tokens; `bar` is a tqdm object, or None for no display."""

    def __init__(self, bar: Any | None) -> None:
        self._bar = bar
        self._started_s = time.monotonic()
        self._num_input_tokens = 0
        self._num_output_tokens = 0

    def advance(self, num_finished: int, num_input_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Add finished prompts and their tokens."""
        if self._bar is None or num_finished == 0:
            return
        self._num_input_tokens += num_input_tokens
        self._num_output_tokens += num_output_tokens
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        input_speed, output_speed = self._num_input_tokens / elapsed_s, self._num_output_tokens / elapsed_s
        self._bar.set_postfix_str(f"input {input_speed:.0f} tok/s, output {output_speed:.0f} tok/s", refresh=False)
        self._bar.update(num_finished)


@contextmanager
def open_progress_bar(use_tqdm: UseTqdm, total: int) -> Iterator[ProgressBar]:
    """Open a bar of `total` prompts; it displays nothing if `use_tqdm` is False."""
    make = use_tqdm if callable(use_tqdm) else _tqdm
    bar = make(total=total, desc="Prompts", dynamic_ncols=True) if use_tqdm else None
    try:
        yield ProgressBar(bar)
    finally:
        if bar is not None:
            bar.close()


def _tqdm(**options: Any) -> Any:
    from tqdm.auto import tqdm

    return tqdm(**options)
