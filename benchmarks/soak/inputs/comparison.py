"""Whether two samples of times differ: two tests, as functions of numbers only.

Next to read: `keys.py` and `prefixes.py`, which use them.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence


def welch(first: Sequence[float], second: Sequence[float], *, trim: float = 0.1) -> float:
    """p of Welch's t on trimmed means: how likely so large a difference is where there is none.

    The share `trim` of each end is left out of the means and pulled in for the variances (Yuen, Biometrika 61, 1974).
    The t distribution is taken as normal: for samples of hundreds and more.
    """
    (mean, variance), (other_mean, other_variance) = _trimmed(first, trim), _trimmed(second, trim)
    if variance + other_variance == 0:
        return 1.0 if mean == other_mean else 0.0
    return math.erfc(abs(mean - other_mean) / math.sqrt(variance + other_variance) / math.sqrt(2))


def _trimmed(values: Sequence[float], trim: float) -> tuple[float, float]:
    """A trimmed mean and the variance of that mean."""
    ordered = sorted(values)
    num_cut = int(len(ordered) * trim)
    kept = ordered[num_cut : len(ordered) - num_cut]
    pulled = [kept[0]] * num_cut + kept + [kept[-1]] * num_cut
    center = sum(pulled) / len(pulled)
    total = sum((value - center) ** 2 for value in pulled)
    return sum(kept) / len(kept), total / (len(kept) * (len(kept) - 1))


def kolmogorov_smirnov(first: Sequence[float], second: Sequence[float]) -> float:
    """p of the two-sample test: how likely two distributions lie so far apart where they are one.

    By Kolmogorov's limit of the distribution of the largest gap: for samples of hundreds and more.
    """
    ordered, others = sorted(first), sorted(second)
    gap = max(
        abs(bisect_right(ordered, value) / len(ordered) - bisect_right(others, value) / len(others))
        for value in (*ordered, *others)
    )
    scaled = gap * math.sqrt(len(ordered) * len(others) / (len(ordered) + len(others)))
    if scaled < 0.2:
        return 1.0  # the series below does not settle there; the value is 1 to 12 digits
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, sum(terms)))
