"""Cached prefixes by hash: a SHA-256 chain over full blocks. Knows no reference counts and no free list.

The digest of block i covers its own tokens and, through the digest of block i - 1, all tokens before it and the
request's hash extras. Equal digest and equal tokens in the block: equal KV content. A checkpoint of recurrent state is
cached under the last block before it. Next to read: `blocks.py`.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.adapter import Adapter

_ROOT = b"quire prefix cache 2\0"
_TOKEN_BYTES = 8
Key = tuple[int, bytes]
"""Cache group and digest of a block."""


@dataclass(slots=True)
class PrefixChain:
    """Digest and packed token ids of each full block of one sequence. Grows as tokens become known.

    Each block is hashed once in a request's life, also across preemptions and failed admissions.
    """

    hash_extras: tuple[str, ...] = ()
    adapter: Adapter | None = None
    digests: list[bytes] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)

    def extend(self, token_ids: Sequence[int], block_size: int) -> None:
        """Add the blocks of the tokens that follow those hashed so far. They are whole blocks."""
        packed = array("q", token_ids).tobytes()
        parent = self.digests[-1] if self.digests else _root(self.hash_extras)
        stride = block_size * _TOKEN_BYTES
        adapter = self.adapter
        # Blocks before an adapter's first position are the base model's; all others follow its content.
        first_of_adapter = adapter.start // block_size if adapter is not None and adapter.start else -1
        for start in range(0, len(packed), stride):
            content = packed[start : start + stride]
            if adapter is not None and len(self.digests) == first_of_adapter:
                parent = hashlib.sha256(parent + f"adapter {adapter.digest} {adapter.start}".encode()).digest()
            parent = hashlib.sha256(parent + content).digest()
            self.digests.append(parent)
            self.contents.append(content)

    def copy(self) -> "PrefixChain":
        """Return an independent chain with the same blocks, for a fork."""
        return PrefixChain(self.hash_extras, self.adapter, self.digests.copy(), self.contents.copy())


def _root(hash_extras: tuple[str, ...]) -> bytes:
    """Digest before the first block. Each extra follows its length, so that no two tuples are encoded alike."""
    # Extras are never shown, so any string will do, also one that is not valid Unicode.
    encoded = [extra.encode("utf-8", "surrogatepass") for extra in hash_extras]
    return hashlib.sha256(_ROOT + b"".join(b"%d:%b" % (len(item), item) for item in encoded)).digest()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Content of a cached block: the tokens `content` after the prefix of `digest`, in the layers of a group."""

    group_index: int
    digest: bytes
    content: bytes

    @property
    def key(self) -> Key:
        """Cache group and digest."""
        return self.group_index, self.digest


class PrefixCache:
    """(KV cache group, digest) → block number, and back."""

    def __init__(self) -> None:
        self._block_ids: dict[Key, int] = {}
        self._entries: dict[int, CacheEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, block_id: int) -> bool:
        """Return True if the block can be found by its prefix."""
        return block_id in self._entries

    def find(self, group_index: int, digest: bytes, content: bytes) -> int | None:
        """Return the block with this prefix. Its token ids are compared: a digest alone is never trusted."""
        block_id = self._block_ids.get((group_index, digest))
        if block_id is None or self._entries[block_id].content != content:
            return None
        return block_id

    def register(self, group_index: int, digest: bytes, content: bytes, block_id: int) -> bool:
        """Make a computed block findable; False if it was, or another block has the prefix: tables never change."""
        key = (group_index, digest)
        if key in self._block_ids or block_id in self._entries:
            return False
        self._block_ids[key] = block_id
        self._entries[block_id] = CacheEntry(group_index, digest, content)
        return True

    def forget(self, block_id: int) -> bool:
        """Drop the block's prefix because its content will be overwritten. Returns: whether it had one."""
        entry = self._entries.pop(block_id, None)
        if entry is None:
            return False
        del self._block_ids[entry.key]
        return True

    def entry(self, block_id: int) -> CacheEntry | None:
        """Return what the block holds; None if it holds no prefix."""
        return self._entries.get(block_id)

    def block_ids(self) -> tuple[int, ...]:
        """Return all blocks that can be found."""
        return tuple(self._entries)

    def digest_of(self, block_id: int, group_index: int) -> bytes | None:
        """Return the digest that the block is cached under for the layers of a group; None if it is not."""
        entry = self._entries.get(block_id)
        return None if entry is None or entry.group_index != group_index else entry.digest
