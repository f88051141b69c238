import numpy as np
import pytest
from numpy.typing import NDArray

from quire.runtime import huge_pages, machine_limits
from quire.runtime.machine_limits import measure_limits, read_rate


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16", "int8"])
def test_both_rates_are_measured(arithmetic: str) -> None:
    """No figure is right on every machine; these bounds only catch a wrong unit."""
    limits = measure_limits("cpu", [arithmetic])
    assert 1e8 < limits.read_bytes_per_s < 1e13
    assert 1e9 < limits.flops_per_s[arithmetic] < 1e15


def test_memory_is_read_from_pages_like_those_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """From small pages a working set is read more slowly than weights are: shares would exceed 100 %."""
    sizes = []

    def allocate(num_bytes: int) -> NDArray[np.uint8]:
        sizes.append(num_bytes)
        return huge_pages.allocate(num_bytes)

    monkeypatch.setattr(machine_limits, "allocate", allocate)
    measure_limits("cpu", ["fp32"], 8 << 20)
    read_rate(4 << 20)
    assert sizes == [8 << 20, 4 << 20]
