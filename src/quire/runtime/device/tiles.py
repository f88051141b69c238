"""`Tiles`: sizes of the Triton kernels' tiles, by the compute capability of a card.

Those of 9.0 were measured on an H200; the others compile without spills and fit the shared memory.
Next to read: `triton_ops.py`.
"""

from dataclasses import dataclass

FEW_ROWS = 16
"""Most rows of a step whose decodes have shorter splits: there are few of them for a whole card."""
MAX_SPLITS = 32
"""Most parts that the keys of a decode are split into. Longer sequences have longer splits."""

MAX_SUMS = 16384
"""Values that the eight warps of a program sum at once."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Rows of queries and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sizes that the kernels of a card are launched with.

    Attributes:
        prompt, decode: of heads of up to 128 values of 16 bits.
        split: shortest split of a decode's keys; split_few: in a step of up to `FEW_ROWS`; split_alone: of one row.
        row_outputs, row_inputs, row_warps: outputs, inputs at once and warps of a program of `linear_row`.
        write_heads, write_warps: heads of up to 128 values and warps of a program of `write_kv`.
        programs_per_multiprocessor: of attention, per KV head.
        pdl: kernels of one-row steps start while the one before them ends (programmatic dependent launch, 9.0 on).
    """

    prompt: AttentionTile
    decode: AttentionTile = AttentionTile(16, 64, 4, 2)
    split: int = 1024
    split_few: int = 256
    split_alone: int = 64
    row_outputs: int = 8
    row_inputs: int = 1024
    row_warps: int = 8
    write_heads: int = 8
    write_warps: int = 8
    programs_per_multiprocessor: int = 2
    pdl: bool = False

    def of_prompts(self, head_size: int, item_bytes: int, group_size: int) -> AttentionTile:
        """Return the tile of prompts for a size of head. `group_size`: query heads per KV head."""
        return _shrunk(self.prompt, head_size, item_bytes, group_size)

    def of_decodes(self, head_size: int, item_bytes: int, num_rows: int) -> AttentionTile:
        """Return the tile of decodes. `num_rows`: query tokens times heads per KV head."""
        return _shrunk(self.decode, head_size, item_bytes, num_rows)


def _shrunk(tile: AttentionTile, head_size: int, item_bytes: int, least_rows: int) -> AttentionTile:
    """Return a tile that needs no more memory than it does for heads of 128 values of 16 bits."""
    size = power_of_two(head_size) * item_bytes // 2
    if size <= 128:
        return AttentionTile(max(tile.rows, power_of_two(least_rows)), tile.keys, tile.num_warps, tile.num_stages)
    rows, keys = min(tile.rows, MAX_SUMS // size), max(tile.keys * 128 // size, 16)
    return AttentionTile(max(rows, power_of_two(least_rows)), keys, 8, tile.num_stages)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


_SMALL = AttentionTile(64, 32, 4, 2)
BY_CAPABILITY = {
    80: Tiles(_SMALL),
    86: Tiles(_SMALL),
    89: Tiles(_SMALL),
    90: Tiles(AttentionTile(64, 64, 4, 2), pdl=True),
    100: Tiles(AttentionTile(128, 64, 8, 3)),
    120: Tiles(_SMALL),
}


def tiles_of(capability: int) -> Tiles:
    """Return the tiles of a compute capability, such as 90; those of the newest one that is not newer."""
    return BY_CAPABILITY[max((known for known in BY_CAPABILITY if known <= capability), default=80)]
