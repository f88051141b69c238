"""Generation without a KV cache: every token of the sequence is computed in every step."""

import pytest

from quire.errors import ComparisonError, ConfigError
from quire.types import RequestResult, ScheduledRequest
from quire_lessons.compare import cache, run
from quire_lessons.compare.cache import sample_lengths
from quire_lessons.compare.results import RunSettings
from quire_lessons.compare.rig import FakeExecutor


@pytest.mark.parametrize("requests", [1, 3])
def test_recomputation_computes_the_sum_of_all_lengths_with_equal_outputs(requests: int) -> None:
    comparison = run("cache", RunSettings(model="fake", context=40, requests=requests))
    assert comparison.outputs_equal == requests
    naive, cached = comparison.rows
    assert naive[1:3] == (
        requests * sum(range(16, 40)), requests * sum(n * (n + 1) // 2 for n in range(16, 40)),
    )  # fmt: skip
    assert cached[1:3] == (requests * 39, requests * 39 * 40 // 2)


def test_naive_generation_of_10_100_and_1000_tokens_computes_5_50_and_500_times_the_rows() -> None:
    comparison = run("cache", RunSettings(model="fake", prompt_lens=(1,), output_lens=(10, 100, 1000)))
    naive, cached = comparison.rows[::2], comparison.rows[1::2]
    assert [row[1] for row in naive] == [55, 5050, 500_500]
    assert [row[1] for row in cached] == [10, 100, 1000]
    for suffix, ratio in (("n = 10:", 5.5), ("n = 100:", 50.5), ("n = 1000:", 500.5)):
        (sentence,) = [item for item in comparison.explanation if item.startswith(f"KV cache, {suffix}")]
        assert f": {ratio} times fewer tokens" in sentence
    assert comparison.outputs_equal == 3
    # A step of the fake model takes one unit, whatever it computes, sampled or not.
    assert [row[3] for row in naive] == [10, 100, 1000]
    sampled = [sentence for sentence in comparison.explanation if "interpolated" in sentence]
    assert len(sampled) == 1
    assert "Steps at 16 of 1000 lengths were measured" in sampled[0]


def test_sampled_steps_agree_with_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings(model="fake", context=64, requests=2)
    whole = run("cache", settings)
    monkeypatch.setattr(cache, "MAX_ROWS", 100)
    sampled = run("cache", settings)
    assert [row[1:3] for row in sampled.rows] == [row[1:3] for row in whole.rows]
    assert any("Steps at 2 of 48 lengths" in sentence for sentence in sampled.explanation)


def test_sampled_lengths_hold_both_ends_and_are_bounded() -> None:
    for prompt_len, num_tokens, requests in ((1, 1000, 1), (16, 8000, 4), (5, 2, 1)):
        lengths = sample_lengths(prompt_len, num_tokens, requests)
        assert (lengths[0], lengths[-1]) == (max(2, prompt_len), prompt_len + num_tokens - 1)
        assert requests * sum(lengths) <= max(cache.MAX_ROWS * 1.1, requests * (lengths[0] + lengths[-1]))


def test_wrong_token_of_a_sampled_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FakeExecutor._sample

    def wrong(self: FakeExecutor, share: ScheduledRequest) -> RequestResult:
        result = right(self, share)
        is_decode = share.num_tokens == 1 and share.num_computed_tokens == 62
        return RequestResult(share.request_id, (result.token_ids[0] ^ 1,)) if is_decode else result

    monkeypatch.setattr(FakeExecutor, "_sample", wrong)
    monkeypatch.setattr(cache, "MAX_ROWS", 100)
    with pytest.raises(ComparisonError, match="behind 63 tokens"):
        run("cache", RunSettings(model="fake", context=64))


@pytest.mark.parametrize("context", [2, 3, 10])
def test_shortest_contexts_are_compared(context: int) -> None:
    comparison = run("cache", RunSettings(model="fake", context=context))
    assert comparison.outputs_equal == 1
    assert comparison.rows[1][1] == context - 1


def test_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="context=21 fits"):
        run("cache", RunSettings(model="fake", context=20, prompt_lens=(20,)))
    with pytest.raises(ConfigError, match="one prompt length, not 2"):
        run("cache", RunSettings(model="fake", prompt_lens=(1, 2)))


@pytest.mark.model
def test_real_model_gives_equal_outputs_without_its_cache(smollm2_path: object) -> None:
    comparison = run("cache", RunSettings(model="smollm2", context=32))
    assert comparison.outputs_equal == 1
