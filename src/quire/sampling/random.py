"""Random numbers that are a pure function of (seed, position), and draws from weights with them.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the seed
is the key, position and attempt are the counter. There is no state to keep, so the draws of a request cannot
depend on other requests, on their order, or on a preemption. Numbers are made on the host for every device, and
sums are sums of integers, so that any device and any batch shape picks the same token for the same weights.
Next to read: `reference.py`, which makes the weights.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.lazy_torch import Tensor, torch

UInt64Array = npt.NDArray[np.uint64]

_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_NUM_ROUNDS = 10


def philox(counter: Sequence[UInt64Array], key: Sequence[UInt64Array]) -> list[UInt64Array]:
    """Philox4x32-10: four random 32-bit words per element from a 128-bit counter and a 64-bit key.

    Shapes: four counter words [R] and two key words [R] -> four words [R].
    """
    first, second, third, fourth = counter
    low_key, high_key = key
    for _ in range(_NUM_ROUNDS):
        left = _MULTIPLIERS[0] * first
        right = _MULTIPLIERS[1] * third
        first, second, third, fourth = (
            (right >> _WORD_BITS) ^ second ^ low_key,
            right & _WORD,
            (left >> _WORD_BITS) ^ fourth ^ high_key,
            left & _WORD,
        )
        low_key = (low_key + _KEY_STEPS[0]) & _WORD
        high_key = (high_key + _KEY_STEPS[1]) & _WORD
    return [first, second, third, fourth]


def uniforms(seeds: Sequence[int], positions: Sequence[int], *, attempt: int = 0) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) with 53 random bits for each (seed, position, attempt).

    Seeds are taken modulo 2**64. Shapes: [R], [R] -> [R].
    """
    keys = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
    places = np.array(positions, dtype=np.uint64)
    attempts = np.full_like(places, attempt)
    counter = (places & _WORD, places >> _WORD_BITS, attempts, np.zeros_like(places))
    words = philox(counter, (keys & _WORD, keys >> _WORD_BITS))
    bits = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Pick one column per row with probability proportional to its weight (inverse of the cumulative sum).

    A column of weight 0 is never picked.
    Shapes: weights [R, C], numbers in [0, 1) [R] -> columns [R].
    Dtypes: weights int64 with sums in (0, 2**62], numbers float64.
    """
    cumulative = weights.cumsum(dim=-1)
    totals = cumulative[:, -1]
    # At most 1 - 2**-53 times the total: rounded to fp64, that is still less than the total.
    targets = (numbers * totals).to(torch.int64)
    return torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
