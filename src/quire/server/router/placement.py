"""Placement: which replica computes a request.

The policy `prefix` estimates, in prompt tokens, the work before the request's first token: the part of its prompt that
the replica has not cached, and what is queued there. Knows no HTTP. Next to read: `fleet.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt: its length in tokens, and the digests of its full blocks of `block_size` tokens.

    Without digests its content is unknown and the length is an estimate.
    """

    num_tokens: int
    block_size: int = 0
    digests: Sequence[bytes] = ()


class Placeable(Protocol):
    """A replica, as placement sees it."""

    @property
    def load_tokens(self) -> float:
        """Return the work that waits there, in prompt tokens."""

    def num_hit_tokens(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt's beginning that are cached there."""


_Replica = TypeVar("_Replica", bound=Placeable)


def choose(policy: str, replicas: Sequence[_Replica], prompt: Prompt, turn: int) -> _Replica:
    """Return the replica for a request, of at least one. `turn`: number of requests before; it also settles ties."""
    start = turn % len(replicas)
    rotated = [*replicas[start:], *replicas[:start]]
    if policy == "round-robin":
        return rotated[0]
    if policy == "least-loaded":
        return min(rotated, key=lambda replica: replica.load_tokens)
    return min(rotated, key=lambda replica: replica.load_tokens - replica.num_hit_tokens(prompt))
