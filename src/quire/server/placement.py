"""Placement: the engine that computes a request, of the engines of one server.

Costs are compared in prompt tokens: the part of its prompt that an engine has not cached, and a part of the work that
waits there. Knows no HTTP. Next to read: `engines.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

RUNNING_TOKENS = 32
"""Prompt tokens that a request of an engine counts as, for its decodes."""
LOAD_WEIGHT = 0.25
"""Weight of the work that waits. Below 1: computing a prefix a second time also takes memory from other prefixes. With
0.5 a simulation of `benchmarks.engines` finds 3 % fewer tokens cached, with 0.1 as many."""
MAX_RATIO, SPARE_REQUESTS = 2, 4
"""An engine with more than `MAX_RATIO` times the fewest requests of any, and `SPARE_REQUESTS`, gets no more: else one
engine would compute all requests with a common prefix while others are idle."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt: its length in tokens, and the digests of its full blocks of `block_size` tokens.

    Without digests the prefix cache is not asked.
    """

    num_tokens: int
    block_size: int = 0
    digests: Sequence[bytes] = ()


class Loaded(Protocol):
    """An engine, as placement sees it."""

    @property
    def num_requests(self) -> int:
        """Requests that wait or run there."""

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait there."""

    def num_hit_tokens(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt's beginning that are cached there."""


_L = TypeVar("_L", bound=Loaded)


def choose(engines: Sequence[_L], prompt: Prompt, turn: int) -> _L:
    """Return the engine for a request, of at least one. `turn`: number of requests before, which settles ties."""
    start = turn % len(engines)
    rotated = [*engines[start:], *engines[:start]]
    most = MAX_RATIO * min(engine.num_requests for engine in rotated) + SPARE_REQUESTS
    candidates = [engine for engine in rotated if engine.num_requests <= most]
    return min(candidates, key=lambda engine: LOAD_WEIGHT * waiting_work(engine) - engine.num_hit_tokens(prompt))


def waiting_work(engine: Loaded) -> int:
    """Return the work that waits at an engine, in prompt tokens."""
    return engine.num_queued_tokens + RUNNING_TOKENS * engine.num_requests
