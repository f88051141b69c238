"""Policies on replicas with known load and known prefixes."""

from dataclasses import dataclass

import pytest

from quire.server.router.placement import Prompt, choose

PROMPT = Prompt(1000, 32, (b"a",) * 30)


@dataclass
class At:
    """A replica."""

    hit: int = 0
    queued: int = 0
    requests: int = 0

    num_queued_tokens = property(lambda self: self.queued)
    num_requests = property(lambda self: self.requests)

    def num_hit_tokens(self, prompt: Prompt) -> int:
        return self.hit


def places(policy: str, *replicas: At, num: int = 1) -> list[int]:
    return [replicas.index(choose(policy, replicas, PROMPT, turn)) for turn in range(num)]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    assert places("round-robin", At(900), At(queued=5000), At(requests=9), num=5) == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("policy", ["prefix", "least-loaded"])
def test_equal_replicas_take_turns(policy: str) -> None:
    a, b = At(), At(requests=0, queued=0, hit=0)
    assert choose(policy, (a, b), PROMPT, 0) is a
    assert choose(policy, (a, b), PROMPT, 1) is b


@pytest.mark.parametrize(
    ("replicas", "loaded", "prefix"),
    [
        ((At(hit=0), At(hit=960)), 0, 1),
        ((At(hit=960, queued=400), At()), 1, 0),  # waiting for 400 tokens is better than computing 960 again
        ((At(hit=128, queued=400), At()), 1, 0),  # a quarter of what waits counts
        ((At(hit=128, queued=600), At()), 1, 1),
        ((At(hit=960, requests=4), At()), 1, 0),
        ((At(hit=960, requests=5), At()), 1, 1),  # one replica must not do all the work of a common prefix
        ((At(hit=960, requests=10), At(requests=3)), 1, 0),
        ((At(requests=3), At(requests=1), At(queued=64)), 1, 1),
    ],
)
def test_prefix_is_weighed_against_load(replicas: tuple[At, ...], loaded: int, prefix: int) -> None:
    assert places("least-loaded", *replicas) == [loaded]
    assert places("prefix", *replicas) == [prefix]
