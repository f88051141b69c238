"""Cases of `kernels/embedding.py`, and the formulas that it must equal."""

from functools import partial

from quire.kernels.embedding import embedding
from quire.lazy_torch import torch
from tests.kernels.case import Arguments, Check, random


def _make(num_tokens: int, num_rows: int, width: int) -> Arguments:
    ids = torch.arange(num_tokens) * 7 % num_rows
    return {"ids": ids, "table": random(num_rows, width)}


CHECKS = (
    Check(
        embedding,
        lambda ids, table: table[ids],
        {"empty": partial(_make, 0, 5, 8), "one row": partial(_make, 1, 5, 8), "odd width": partial(_make, 33, 10, 67)},
    ),
)
