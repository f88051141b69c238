"""Placement: which replica computes a request.

The policy `prefix` compares costs in prompt tokens: the part of its prompt that a replica has not cached, and a part of
the work that waits there. Knows no HTTP. Next to read: `fleet.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.server.router.replica import Replica

RUNNING_TOKENS = 32
"""Prompt tokens that a request of a replica counts as, for its decodes."""
LOAD_WEIGHT = 0.25
"""Weight of the work that waits. Below 1: computing a prefix a second time also takes memory from other prefixes. With
0.5 a simulation of `benchmarks.router` finds 3 % fewer tokens cached, with 0.1 as many."""
MAX_RATIO, SPARE_REQUESTS = 2, 4
"""A replica with more than `MAX_RATIO` times the fewest requests of any, and `SPARE_REQUESTS`, gets no more: else one
replica would compute all requests with a common prefix while others are idle."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt: its length in tokens, and the digests of its full blocks of `block_size` tokens.

    Without digests its content is unknown and the length is an estimate.
    """

    num_tokens: int
    block_size: int = 0
    digests: Sequence[bytes] = ()


def choose(policy: str, replicas: Sequence["Replica"], prompt: Prompt, turn: int) -> "Replica":
    """Return the replica for a request, of at least one. `turn`: number of requests before; it also settles ties."""
    start = turn % len(replicas)
    rotated = [*replicas[start:], *replicas[:start]]
    if policy == "round-robin":
        return rotated[0]
    if policy == "least-loaded":
        return min(rotated, key=_load)
    most = MAX_RATIO * min(replica.num_requests for replica in rotated) + SPARE_REQUESTS
    candidates = [replica for replica in rotated if replica.num_requests <= most]
    return min(candidates, key=lambda replica: LOAD_WEIGHT * _load(replica) - replica.num_hit_tokens(prompt))


def _load(replica: "Replica") -> int:
    """Return the work that waits at a replica, in prompt tokens."""
    return replica.num_queued_tokens + RUNNING_TOKENS * replica.num_requests
