"""Digests of the cached prefix blocks of one engine, as the server process knows them.

The engine's end, `PrefixJournal`, turns events of the log into changes; each message of updates carries them. The
server's end, `PrefixMirror`, keeps the set. A digest is the beginning of the SHA-256 of `scheduler/prefix_cache.py`:
it decides where a request is computed, never what it may share. Knows no HTTP.
Next to read: `statistics.py`, `../../server/engines.py`.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from quire.scheduler.prefix_cache import PrefixChain
from quire.types import RequestSpec

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

DIGEST_BYTES = 8
"""Bytes of a digest that are sent: among a million blocks two are equal with a probability of 3e-8."""


class PrefixJournal:
    """Changes of an engine's prefix cache since the last `take`, of the layers that keep the most blocks."""

    def __init__(self, engine: "LLMEngine") -> None:
        self._cache = engine.scheduler.blocks.cache
        specs = [group.spec for group in engine.config.scheduler.kv_cache_groups]
        # Blocks of layers with a window are released earlier, states are kept at checkpoints only.
        order = sorted(range(len(specs)), key=lambda at: (specs[at].is_state, specs[at].window is not None))
        self._group_index = order[0]
        self._known: dict[int, bytes] = {}
        self._touched: set[int] = set()

    def note(self, block_ids: Iterable[int]) -> None:
        """Note blocks that were cached or evicted."""
        self._touched.update(block_ids)

    def note_all(self) -> None:
        """Note every block: events were lost."""
        self._touched.update(self._known, self._cache.block_ids())

    def take(self) -> tuple[bytes, bytes]:
        """Return the digests that came and those that went, `DIGEST_BYTES` each. Mutates: they are not new again."""
        if not self._touched:
            return b"", b""
        cached, evicted = [], []
        for block_id in self._touched:
            before, now = self._known.get(block_id), self._cache.digest_of(block_id, self._group_index)
            if now == before:
                continue
            if before is not None:
                evicted.append(self._known.pop(block_id)[:DIGEST_BYTES])
            if now is not None:
                self._known[block_id] = now
                cached.append(now[:DIGEST_BYTES])
        self._touched.clear()
        return b"".join(cached), b"".join(evicted)


class PrefixMirror:
    """The digests of one engine's cached blocks."""

    def __init__(self) -> None:
        self.digests: set[bytes] = set()

    def apply(self, cached: bytes, evicted: bytes) -> None:
        """Take over the changes of one message. A prefix may move to another block: evictions come first."""
        self.digests.difference_update(split(evicted))
        self.digests.update(split(cached))


def split(digests: bytes) -> Iterator[bytes]:
    """Yield each digest of a string of them."""
    return (digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES))


def prompt_digests(spec: RequestSpec, block_size: int) -> bytes:
    """Return the digests of the full blocks that a request may find cached: at least one token is computed."""
    chain = PrefixChain(spec.hash_extras, spec.adapter)
    num_tokens = (spec.num_prompt_tokens - 1) // block_size * block_size
    chain.extend(spec.prompt_token_ids[:num_tokens], block_size)
    return b"".join(digest[:DIGEST_BYTES] for digest in chain.digests)
