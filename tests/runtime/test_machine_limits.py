import pytest

from quire.runtime.machine_limits import measure_limits


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16", "int8"])
def test_both_rates_are_measured(arithmetic: str) -> None:
    """No figure is right on every machine; these bounds only catch a wrong unit."""
    limits = measure_limits("cpu", [arithmetic])
    assert 1e8 < limits.read_bytes_per_s < 1e13
    assert 1e9 < limits.flops_per_s[arithmetic] < 1e15
