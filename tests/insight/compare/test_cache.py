"""Generation without a KV cache: every token of the sequence is computed in every step."""

import pytest

from quire.insight.compare import run
from quire.insight.compare.results import Settings


@pytest.mark.parametrize("requests", [1, 3])
def test_recomputation_computes_the_sum_of_all_lengths_with_equal_outputs(requests: int) -> None:
    comparison = run("cache", Settings(model="fake", context=40, requests=requests))
    assert comparison.outputs_equal == requests
    naive, cached = comparison.rows
    assert naive[1:3] == (
        requests * sum(range(16, 40)), requests * sum(n * (n + 1) // 2 for n in range(16, 40)),
    )  # fmt: skip
    assert cached[1:3] == (requests * 39, requests * 39 * 40 // 2)


@pytest.mark.model
def test_real_model_gives_equal_outputs_without_its_cache(smollm2_path: object) -> None:
    comparison = run("cache", Settings(model="smollm2", context=32))
    assert comparison.outputs_equal == 1
