"""Prefix caching: what is hashed, what counts as a hit, and what is evicted first."""

import hashlib
from array import array

import pytest

from quire.scheduler.prefix_cache import PrefixCache, PrefixChain
from tests.scheduler.builders import Driver, make_config, make_request, run_alone


def chain_of(tokens: list[int], block_size: int = 4, extras: tuple[str, ...] = ()) -> PrefixChain:
    chain = PrefixChain(extras)
    chain.extend(tokens[: len(tokens) // block_size * block_size], block_size)
    return chain


def test_digest_is_a_chain_of_sha256_over_parent_and_tokens() -> None:
    chain = chain_of([1, 2, 3, 4, 5, 6, 7, 8])
    content = array("q", [5, 6, 7, 8]).tobytes()
    assert chain.contents[1] == content
    assert chain.digests[1] == hashlib.sha256(chain.digests[0] + content).digest()


def test_digest_alone_is_not_trusted() -> None:
    cache = PrefixCache()
    cache.register(0, b"digest", b"content", 7)
    assert cache.find(0, b"digest", b"content") == 7
    assert cache.find(0, b"digest", b"other") is None
    assert cache.find(1, b"digest", b"content") is None


@pytest.mark.parametrize(
    ("prompt_len", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (40, 20), (25, 20)]
)
def test_hit_counts_are_exact(prompt_len: int, hit: int) -> None:
    # The first request computes 20 prompt tokens and 2 of its 3 generated ones: five full blocks.
    driver = Driver(make_config())
    tokens = list(range(100, 140))
    driver.add(make_request("first", tokens[:20], 3))
    driver.run()
    second = make_request("second", tokens[:prompt_len], 3)
    driver.add(second)
    driver.run()
    assert second.num_cached_tokens == hit
    assert second.output_token_ids == run_alone(second, 256)


def test_generated_tokens_are_cached_too() -> None:
    driver = Driver(make_config())
    first = make_request("first", 6, 7)
    driver.add(first)
    driver.run()
    # 6 + 6 computed tokens are three full blocks.
    again = make_request("again", first.prompt_token_ids + first.output_token_ids + [1], 2)
    driver.add(again)
    driver.run()
    assert again.num_cached_tokens == 12


def test_block_that_is_known_but_not_computed_is_not_found() -> None:
    driver = Driver(make_config(max_num_batched_tokens=6, max_num_partial_prefills=2))
    tokens = list(range(8))
    driver.add(make_request("a", tokens))
    assert driver.shares() == {"a": 6}
    driver.add(other := make_request("b", [*tokens, 1]))
    assert driver.shares() == {"a": 2, "b": 4}
    assert other.num_cached_tokens == 4
    driver.run()
    assert other.output_token_ids == run_alone(other, 256)


def test_requests_with_different_salts_do_not_share_blocks() -> None:
    driver = Driver(make_config())
    tokens = list(range(17))
    cached = []
    for index, salt in enumerate(["", "x", "y", "x", ""]):
        request = make_request(f"r{index}", tokens, hash_extras=(salt,))
        driver.add(request)
        driver.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 0, 16, 16]


def test_requests_that_need_every_position_read_nothing_but_are_read() -> None:
    driver = Driver(make_config())
    tokens = list(range(17))
    requests = [make_request(f"r{index}", tokens, reads_prefix_cache=index == 2) for index in range(3)]
    for request in requests:
        driver.add(request)
        driver.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 16]


def test_num_cached_tokens_is_of_the_first_admission() -> None:
    driver = Driver(make_config(num_blocks=9))
    requests = [make_request(name, 8, 16) for name in "abc"]
    driver.add(*requests)
    driver.run()
    assert sum(request.num_preemptions for request in requests) > 0
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0]


def test_start_of_a_prefix_is_evicted_last() -> None:
    driver = Driver(make_config(num_blocks=11, max_model_len=40))
    tokens = list(range(24))
    driver.add(make_request("first", tokens, 1))
    driver.run()
    # Six of ten blocks are cached. Taking seven costs the three deepest of them.
    driver.add(make_request("other", 28, 1))
    driver.run()
    again = make_request("again", tokens, 1)
    driver.add(again)
    driver.run()
    assert again.num_cached_tokens == 12


def test_least_recently_used_prefix_goes_first() -> None:
    driver = Driver(make_config(num_blocks=11, max_model_len=40))
    old, new = list(range(13)), list(range(100, 113))
    for name, tokens in (("old", old), ("new", new), ("touch-old", old)):
        driver.add(make_request(name, tokens, 1))
        driver.run()
    driver.add(make_request("big", 28, 1))
    driver.run()
    cached = []
    for name, tokens in (("old?", old), ("new?", new)):
        request = make_request(name, tokens, 1)
        driver.add(request)
        driver.run()
        cached.append(request.num_cached_tokens)
    assert cached == [12, 0]


def test_reset_forgets_everything_but_not_while_blocks_are_in_use() -> None:
    driver = Driver(make_config())
    driver.add(make_request("a", range(17), 3))
    driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    driver.run()
    assert driver.scheduler.reset_prefix_cache()
    request = make_request("b", range(17))
    driver.add(request)
    driver.step()
    assert request.num_cached_tokens == 0
