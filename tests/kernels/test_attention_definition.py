"""Paged attention against the formula, one query and one key at a time, in fp64."""

import pytest
import torch

from quire.kernels.case import Case
from quire.kernels.paged_attention import paged_attention
from quire.kernels.paged_attention.cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_paged_attention_equals_the_formula(case: Case) -> None:
    arguments = case.make()
    q, cache, step, window = (arguments[name] for name in ("q", "kv_cache", "step", "window"))
    block_size, group_size = cache.shape[2], q.shape[1] // cache.shape[3] if len(q) else 1
    expected, token = torch.zeros(q.shape, dtype=torch.float64), 0
    for request, (query_len, seq_len) in enumerate(zip(step.query_lens_list, step.seq_lens_list, strict=True)):
        table = step.block_tables[0][request].tolist()
        for position in range(seq_len - query_len, seq_len):
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            kv = torch.stack([cache[table[p // block_size], :, p % block_size] for p in seen]).double()
            for head in range(q.shape[1]):
                k, v = kv[:, 0, head // group_size], kv[:, 1, head // group_size]
                scores = arguments["scale"] * (k @ q[token, head].double())
                if (cap := arguments.get("soft_cap")) is not None:
                    scores = cap * torch.tanh(scores / cap)
                expected[token, head] = scores.softmax(0) @ v
            token += 1
    torch.testing.assert_close(paged_attention(**arguments).double(), expected, rtol=1e-4, atol=1e-5)
