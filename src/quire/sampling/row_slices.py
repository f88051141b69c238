"""How many rows of logits are worked on at once, so that temporaries stay bounded whatever the batch.

Knows shapes only. Next to read: `sampler.py`.
"""

from collections.abc import Iterator

SLICE_ELEMENTS = 4 * 1024 * 1024
"""Logits per slice: 16 MiB in fp32, 32 MiB as fixed-point weights; 85 rows of 49,152."""


def row_slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Cut `num_rows` rows into slices of at most SLICE_ELEMENTS elements, and at least one row."""
    rows = max(1, SLICE_ELEMENTS // vocab_size)
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))
