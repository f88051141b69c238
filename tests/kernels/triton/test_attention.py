"""Attention kernels beside an fp64 formula and `kernels/paged_attention.py`, on pools that hold NaN where unused."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.kernels.paged_attention import paged_attention
from tests.kernels.triton.steps import Case, Layer


def random_requests(rng: random.Random, case: Case) -> list[tuple[int, int, int]]:
    """Return decodes, then prompts and later chunks of them: row, start, count."""
    most = 4 if case.has_drafts else 1
    rows = rng.sample(range(8), 8)
    decodes = [(rows.pop(), rng.randint(0, 110), rng.randint(1, most)) for _ in range(rng.randint(0, 4))]
    prompts = [
        (rows.pop(), rng.choice([0, rng.randint(0, 40)]), rng.randint(most + 1, 80))
        for _ in range(rng.randint(0 if decodes else 1, 3))
    ]
    return decodes + prompts


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("seed", range(24))
def test_mixed_steps_equal_the_formula_and_bits_do_not_depend_on_the_batch(seed: int) -> None:
    rng = random.Random(seed)
    case = Case.random(rng)
    requests = random_requests(rng, case)
    layer = Layer(case, {row: start + count for row, start, count in requests}, seed)
    queries = {row: torch.randn(count, case.heads, case.size) for row, _, count in requests}
    found = layer.attend(requests, queries)
    assert error(found, layer.formula(requests, queries)) < 2e-5
    at = 0
    for request in requests[:2]:
        alone = layer.attend([request], queries, padding=1)  # a step of one row is split in another way
        assert torch.equal(alone, found[at : at + request[2]])
        at += request[2]


@pytest.mark.parametrize(("start", "window", "sinks"), [(0, 0, True), (31, 0, True), (70, 0, False), (1100, 40, True)])
def test_one_row_needs_no_work_lists(start: int, window: int, sinks: bool) -> None:
    case = Case(kv_heads=2, group=3, size=24, window=window, cap=0.0, has_sinks=sinks, has_drafts=False)
    layer = Layer(case, {4: start + 1}, 0)
    queries = {4: torch.randn(1, case.heads, case.size)}
    for lists in layer.ops._lists.values():
        lists.num_splits.fill_(-7)
    assert error(layer.attend([(4, start, 1)], queries), layer.formula([(4, start, 1)], queries)) < 2e-5


def test_results_equal_the_reference_kernel() -> None:
    case = Case(kv_heads=2, group=3, size=16, window=20, cap=3.0, has_sinks=True, has_drafts=False)
    requests = [(3, 70, 1), (5, 0, 1), (0, 9, 50)]
    layer = Layer(case, {row: start + count for row, start, count in requests}, 0)
    queries = {row: torch.randn(count, case.heads, case.size) for row, _, count in requests}
    found = layer.attend(requests, queries)
    step: Any = SimpleNamespace(
        block_tables=(layer.step.tables[0, [row for row, _, _ in requests]].cpu(),),
        query_lens_list=tuple(count for _, _, count in requests),
        seq_lens_list=tuple(start + count for _, start, count in requests),
    )
    sinks = layer.sinks.cpu() if layer.sinks is not None else None
    q = torch.cat([queries[row] for row, _, _ in requests])
    clean = layer.kv.values.cpu().nan_to_num(0.0)
    expected = paged_attention(q, clean, step, 0, layer.scale, case.window, case.cap, sinks)
    assert error(found, expected) < 2e-5


@pytest.mark.parametrize(("window", "length"), [(0, 1200), (0, 993), (1100, 1200)])
def test_long_sequences_have_longer_splits_not_more(window: int, length: int) -> None:
    case = Case(kv_heads=1, group=2, size=16, window=window, cap=0.0, has_sinks=False, has_drafts=True)
    requests = [(1, length - 3, 3), (2, 30, 1)]
    layer = Layer(case, {row: start + count for row, start, count in requests}, 1)
    queries = {row: torch.randn(count, case.heads, case.size) for row, _, count in requests}
    assert error(layer.attend(requests, queries), layer.formula(requests, queries)) < 2e-5
    [lists] = layer.ops._lists.values()
    assert lists.num_splits[0] <= 32
