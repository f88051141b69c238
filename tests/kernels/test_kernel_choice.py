"""Choice of a kernel's version, and the trace of calls (`kernels/registry.py`)."""

import logging
from collections.abc import Iterator

import pytest
import torch

from quire.errors import ConfigError
from quire.kernels import registry
from quire.kernels.linear import linear, pack_weight
from quire.kernels.rms_norm import rms_norm


def forget_choices() -> None:
    """Let all kernels read the environment again."""
    for kernel in registry.KERNELS.values():
        kernel.chosen.clear()


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("QUIRE_KERNELS", raising=False)
    monkeypatch.delenv("QUIRE_TRACE", raising=False)
    forget_choices()
    yield
    monkeypatch.undo()
    forget_choices()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("", {}),
        ("rms_norm:reference, linear:packed", {"rms_norm": "reference", "linear": "packed"}),
        ("linear:packed,linear:reference", {"linear": "reference"}),
        ("packed", {"linear": "packed"}),
        ("reference", dict.fromkeys(registry.available_versions(), "reference")),
    ],
)
def test_setting_names_versions(setting: str, expected: dict[str, str]) -> None:
    assert registry.requested_versions(setting) == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rms_nrom:reference", r"unknown operation 'rms_nrom' \(did you mean 'rms_norm'\?\)"),
        ("rms_norm:referenec", r"rms_norm has no version 'referenec' \(did you mean 'reference'\?\)"),
        ("rms_norm:packed", "rms_norm has no version 'packed'.*it has reference"),
        ("referenec", r"no kernel has a version 'referenec' \(did you mean 'reference'\?\)"),
        ("rms_norm:", "rms_norm has no version ''"),
    ],
)
def test_unknown_operation_or_version_is_an_error_with_the_nearest(
    setting: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_KERNELS", setting)
    with pytest.raises(ConfigError, match=message):
        registry.check_environment()
    with pytest.raises(ConfigError, match=message):
        rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5)


def test_environment_chooses_the_version_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(4, 4)
    assert (linear.version_on("cpu"), linear.version_on("cuda")) == ("packed", "reference")
    assert pack_weight(weight).is_mkldnn
    monkeypatch.setenv("QUIRE_KERNELS", "linear:reference")
    assert linear.version_on("cpu") == "reference"
    assert pack_weight(weight) is weight


def test_trace_names_kernel_version_shapes_and_dtypes_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUIRE_TRACE", "1")
    forget_choices()
    with caplog.at_level(logging.INFO, logger="quire.kernels"), pytest.raises(RuntimeError):
        linear(torch.ones(2, 3), torch.ones(5, 4), None)
    (record,) = caplog.records
    assert record.getMessage() == "linear (packed): [2, 3] float32, [5, 4] float32, None"


def test_no_trace_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quire.kernels"):
        rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5)
    assert not caplog.records


def test_trace_accepts_only_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TRACE", "yes")
    with pytest.raises(ConfigError, match="QUIRE_TRACE='yes' is not 0, 1 or events"):
        registry.check_environment()
