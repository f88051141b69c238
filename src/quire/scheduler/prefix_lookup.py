"""`PrefixLookup`: the longest cached prefix that all cache groups of the model can serve, on the device or in any tier.
`Checkpoints`: the positions at which the prefix cache keeps recurrent states, and the states that it has there.

Both take nothing: the blocks that they name are the caller's to share. Next to read: `blocks.py`, `tiers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from quire import cache_spec
from quire.cache_spec import RecurrentState
from quire.config import SchedulerConfig
from quire.scheduler.prefix_cache import PrefixCache
from quire.scheduler.request import KeptState, Request
from quire.types import NULL_BLOCK_ID

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest usable cached prefix: whole blocks, available in all groups, never the whole sequence."""

    num_tokens: int
    tables: list[list[int]]
    """Per group an entry per block, null blocks where no coming token looks; for states the checkpoint."""


class PrefixLookup:
    """Looks requests up."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self._block_size = config.block_size
        self._is_enabled = config.enable_prefix_caching
        self._specs = [group.spec for group in config.kv_cache_groups]
        self._cache = cache

    def find(self, request: Request) -> PrefixHit:
        """Return the cached prefix of the request's known tokens; at least one token is left to compute."""
        num_tokens, found = self.search(request, self._cache.find)
        tables = []
        for spec, real in zip(self._specs, found, strict=True):
            padding = spec.table_len(num_tokens, self._block_size) - len(real)
            tables.append([NULL_BLOCK_ID] * padding + real)
        return PrefixHit(num_tokens, tables)

    def search(self, request: Request, find: Callable[[int, bytes, bytes], T | None]) -> tuple[int, list[list[T]]]:
        """Return the tokens of the longest prefix whose blocks `find` knows, and per group the blocks it needs.

        `find`: group, digest and content of a block → the block, None if it is not there.
        """
        if not (self._is_enabled and request.spec.reads_prefix_cache):
            return 0, [[] for _ in self._specs]
        limit = (request.num_tokens - 1) // self._block_size
        chain = request.hashes(limit, self._block_size)
        rows: list[list[T | None]] = []
        for index, spec in enumerate(self._specs):
            row: list[T | None] = []
            for digest, content in zip(chain.digests[:limit], chain.contents, strict=False):
                block = find(index, digest, content)
                if block is None and spec.window is None and not spec.is_state:
                    break
                row.append(block)
            rows.append(row)
            limit = min(limit, len(row))
        num_blocks = self._agree(rows, limit)
        num_tokens = num_blocks * self._block_size
        needed = []
        for spec, row in zip(self._specs, rows, strict=True):
            first = spec.first_of_hit(num_tokens, self._block_size)
            needed.append([block for block in row[first:num_blocks] if block is not None])
        return num_tokens, needed

    def _agree(self, rows: list[list[T | None]], limit: int) -> int:
        """Blocks of the longest prefix that every group can serve: full groups need all blocks, window groups the
        window's, state groups a checkpoint at the end."""
        num_blocks = limit
        # Rows of the other groups end at their first gap.
        gapped = [
            item for item in zip(self._specs, rows, strict=True) if item[0].window is not None or item[0].is_state
        ]
        while num_blocks:
            gaps = [
                at
                for spec, row in gapped
                for at in range(spec.first_of_hit(num_blocks * self._block_size, self._block_size), num_blocks)
                if row[at] is None
            ]
            if not gaps:
                break
            # Every prefix that reaches beyond a gap and is no longer than this one needs the missing block too.
            num_blocks = min(gaps)
        return num_blocks


class Checkpoints:
    """Checkpoints of all requests; none without recurrent states, or if prompts may not be split to end at one.

    Every step rewrites a request's state, so a step that starts from a checkpoint continues in a copy of its page.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self._block_size, self._cache = config.block_size, cache
        specs = [group.spec for group in config.kv_cache_groups]
        self._groups = [index for index, spec in enumerate(specs) if spec.is_state]
        intervals = [spec.checkpoint_interval for spec in specs if isinstance(spec, RecurrentState)]
        is_possible = intervals and config.enable_prefix_caching and config.enable_chunked_prefill
        self._interval = intervals[0] if is_possible else None

    def chunk_limit(self, request: Request, num_tokens: int) -> int:
        """Return how many of `num_tokens` a step may compute so that it ends at or before the next checkpoint."""
        interval, start, last = self._interval, request.num_computed_tokens, self._last(request)
        if interval is None:
            return num_tokens
        stop = start - start % interval + interval
        return min(num_tokens, (min(stop, last) if start < last else stop) - start)

    def wants(self, request: Request) -> bool:
        """Return True if the state before the next step is a checkpoint that the prefix cache lacks."""
        start = request.num_computed_tokens
        if not self._is_checkpoint(request, start):
            return False
        if start > request.num_tokens:
            return True  # steps in flight will yield some of its tokens: `register` will know the hash
        at = start // self._block_size - 1
        chain = request.hashes(at + 1, self._block_size)
        return any(self._cache.find(i, chain.digests[at], chain.contents[at]) is None for i in self._groups)

    def register(self, request: Request, kept: KeptState) -> list[int]:
        """Make a kept state findable if it is a checkpoint. Returns: the pages that can be found now."""
        if not self._is_checkpoint(request, kept.position):
            return []
        at = kept.position // self._block_size - 1
        chain = request.hashes(at + 1, self._block_size)
        digest, content = chain.digests[at], chain.contents[at]
        return [page for index, page in kept.block_ids.items() if self._cache.register(index, digest, content, page)]

    def _is_checkpoint(self, request: Request, position: int) -> bool:
        """Return True if the prefix cache is to keep the state after the first `position` tokens."""
        if self._interval is None or position == 0:
            return False
        return position % self._interval == 0 or position == self._last(request)

    def _last(self, request: Request) -> int:
        """Return where a prompt gets a checkpoint besides those at multiples of the interval; 0 for none.

        The next turn of a conversation goes on there. It is the last full block, if the interval leaves so much behind
        it that to compute that again costs more than one more chunk of the prompt.
        """
        last = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        is_worth = self._interval is not None and last % self._interval >= cache_spec.CHECKPOINT_INTERVALS[0]
        return last if is_worth and request.sampling is not None else 0
