"""Every version of every kernel on every case of its folder: the one test that a new kernel must pass."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import quire.kernels
from quire.kernels.case import Arguments, Case, Check, cast
from quire.kernels.registry import available_versions

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def all_checks() -> list[Any]:
    folder = Path(quire.kernels.__file__).parent
    found = []
    for operation in sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "_"):
        cases = importlib.import_module(f"quire.kernels.{operation}.cases")
        for check in cases.CHECKS:
            for version in check.kernel.versions:
                found += [
                    pytest.param(check, version, case, id=f"{check.kernel.function}-{version}-{case.name}")
                    for case in check.cases
                ]
    return found


def prepare(check: Check, case: Case, dtype: torch.dtype, device: torch.device) -> Arguments:
    """The case's inputs in this dtype, on this device."""
    arguments: Arguments = {}
    for name, value in case.make().items():
        if isinstance(value, torch.Tensor):
            wanted = value.dtype if name in check.kept_float32 else dtype
            arguments[name] = cast(value, wanted, device)
        elif hasattr(value, "block_tables"):
            value.block_tables = tuple(table.to(device) for table in value.block_tables)
            arguments[name] = value
        else:
            arguments[name] = value
    return arguments


def outcome(check: Check, run: Any, arguments: Arguments) -> torch.Tensor:
    """What a version returns, or leaves in the argument it mutates."""
    with torch.inference_mode():
        returned = run(**arguments)
    return returned if check.mutated is None else arguments[check.mutated].clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("check", "version", "case"), all_checks())
def test_version_errs_at_most_twice_as_much_as_plain_pytorch(
    check: Check, version: str, case: Case, dtype: torch.dtype
) -> None:
    verify(check, version, case, dtype, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("operation", sorted(available_versions()))
def test_versions_on_gpu(operation: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for check in importlib.import_module(f"quire.kernels.{operation}.cases").CHECKS:
        for version in check.kernel.versions:
            for case in check.cases:
                for dtype in DTYPES:
                    verify(check, version, case, dtype, torch.device("cuda"))


def verify(check: Check, version: str, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """Compare one version with the fp64 reference, or exactly where values are only moved."""
    found = outcome(check, check.kernel.versions[version], prepare(check, case, dtype, device))
    reference = check.kernel.versions["reference"]
    if check.plain is None:
        expected = outcome(check, reference, prepare(check, case, dtype, device))
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
        return
    rounded = prepare(check, case, dtype, device)
    wide = {
        name: cast(value, torch.float64, device) if isinstance(value, torch.Tensor) else value
        for name, value in rounded.items()
    }
    truth = outcome(check, reference, wide)
    plain = outcome(check, check.plain, prepare(check, case, dtype, device))
    assert found.shape == truth.shape
    assert found.dtype == dtype
    assert not found.isnan().any()
    if truth.numel():
        smallest = 2 * torch.finfo(dtype).eps * truth.abs().max()
        allowed = 2 * (plain.double() - truth).abs().max() + smallest
        assert (found.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize(("check", "version", "case"), all_checks())
def test_repeating_gives_the_same_bits(check: Check, version: str, case: Case) -> None:
    device = torch.device("cpu")
    first, second = (
        outcome(check, check.kernel.versions[version], prepare(check, case, torch.bfloat16, device)) for _ in range(2)
    )
    assert torch.equal(first.nan_to_num(), second.nan_to_num())


@pytest.mark.parametrize("operation", sorted(available_versions()))
def test_versions_registered_are_the_files_of_the_folder(operation: str) -> None:
    cases = importlib.import_module(f"quire.kernels.{operation}.cases")
    for check in cases.CHECKS:
        assert check.kernel.operation == operation
        assert tuple(sorted(check.kernel.versions)) == available_versions()[operation]


def test_every_folder_is_an_operation_with_a_reference_and_cases() -> None:
    folder = Path(quire.kernels.__file__).parent
    for path in folder.iterdir():
        if path.is_dir() and path.name[0] != "_":
            assert (path / "reference.py").is_file(), path.name
            assert (path / "cases.py").is_file(), path.name
