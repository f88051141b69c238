import random

import pytest
from scipy import stats

from benchmarks.soak.inputs.comparison import kolmogorov_smirnov, welch


def samples(shift: float, size: int = 2000) -> tuple[list[float], list[float]]:
    choices = random.Random(int(shift * 100))
    return [choices.lognormvariate(0, 1) for _ in range(size)], [choices.lognormvariate(shift, 1) for _ in range(size)]


@pytest.mark.parametrize("shift", [0, 0.05, 0.1, 0.5])
def test_equal_scipy(shift: float) -> None:
    first, second = samples(shift)
    assert welch(first, second) == pytest.approx(
        stats.ttest_ind(first, second, equal_var=False, trim=0.1).pvalue, abs=2e-3
    )
    assert kolmogorov_smirnov(first, second) == pytest.approx(stats.ks_2samp(first, second).pvalue, abs=0.02)


def test_what_is_the_same_and_what_is_not() -> None:
    first, second = samples(0.5)
    assert welch(first, first) == kolmogorov_smirnov(first, first) == 1
    assert max(welch(first, second), kolmogorov_smirnov(first, second)) < 1e-6
    assert welch([1.0] * 10, [1.0] * 10) == 1
    assert welch([1.0] * 10, [2.0] * 10) == 0
