"""Placement on engines with known load and known prefixes."""

from dataclasses import dataclass

import pytest

from quire.server.placement import Prompt, choose

PROMPT = Prompt(1000, 32, (b"a",) * 30)


@dataclass(eq=False)
class At:
    """An engine."""

    hit: int = 0
    num_queued_tokens: int = 0
    num_requests: int = 0

    def num_hit_tokens(self, prompt: Prompt) -> int:
        return self.hit


def test_equal_engines_take_turns() -> None:
    engines = [At(), At(), At()]
    assert [engines.index(choose(engines, PROMPT, turn)) for turn in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("engines", "chosen"),
    [
        ((At(hit=0), At(hit=960)), 1),
        ((At(hit=960, num_queued_tokens=400), At()), 0),  # waiting for 400 tokens is better than computing 960 again
        ((At(hit=128, num_queued_tokens=400), At()), 0),  # a quarter of what waits counts
        ((At(hit=128, num_queued_tokens=600), At()), 1),
        ((At(hit=960, num_requests=4), At()), 0),
        ((At(hit=960, num_requests=5), At()), 1),  # one engine must not do all the work of a common prefix
        ((At(hit=960, num_requests=10), At(num_requests=3)), 0),
        ((At(num_requests=3), At(num_requests=1), At(num_queued_tokens=64)), 1),
    ],
)
def test_prefix_is_weighed_against_load(engines: tuple[At, ...], chosen: int) -> None:
    assert engines.index(choose(engines, PROMPT, 0)) == chosen
