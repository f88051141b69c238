"""The debugging variables and the trace of calls (`kernels/registry.py`)."""

import logging
from collections.abc import Iterator

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels import registry
from quire.kernels.linear import linear
from quire.kernels.rms_norm import rms_norm


def forget_choices() -> None:
    """Let all kernels read the environment again."""
    for kernel in registry.KERNELS.values():
        kernel.__dict__.pop("run", None)


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("QUIRE_KERNELS", raising=False)
    monkeypatch.delenv("QUIRE_TRACE", raising=False)
    forget_choices()
    yield
    monkeypatch.undo()
    forget_choices()


def test_kernels_setting_has_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KERNELS", "reference")
    registry.check_environment()
    monkeypatch.setenv("QUIRE_KERNELS", "packed")
    with pytest.raises(ConfigError, match="QUIRE_KERNELS='packed' is not reference"):
        registry.check_environment()


def test_trace_names_kernel_shapes_and_dtypes_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_TRACE", "1")
    forget_choices()
    with caplog.at_level(logging.INFO, logger="quire.kernels"), pytest.raises(RuntimeError):
        linear(torch.ones(2, 3), torch.ones(5, 4), None)
    (record,) = caplog.records
    assert record.getMessage() == "linear: [2, 3] float32, [5, 4] float32, None"


def test_no_trace_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quire.kernels"):
        rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5)
    assert not caplog.records


def test_trace_accepts_only_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TRACE", "yes")
    with pytest.raises(ConfigError, match="QUIRE_TRACE='yes' is not 0, 1 or events"):
        registry.check_environment()
