"""Every kernel's reference on every case in `cases/`: the one test that a new kernel must pass."""

import importlib
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from quire.kernels.registry import KERNELS, import_operations
from tests.kernels.case import Arguments, Check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def checks_of(operation: str) -> tuple[Check, ...]:
    """Return the checks of an operation. Raises: ModuleNotFoundError if it has none."""
    checks: tuple[Check, ...] = importlib.import_module(f"tests.kernels.cases.{operation}").CHECKS
    return checks


import_operations()
OPERATIONS = sorted({kernel.__module__.rpartition(".")[2] for kernel in KERNELS.values()})
CHECKS = [check for operation in OPERATIONS for check in checks_of(operation)]
ALL = [pytest.param(check, case, id=f"{check.kernel.function}-{case}") for check in CHECKS for case in check.cases]


def cast(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the same values and strides in another dtype on another device; integers keep their dtype."""
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = tensor.as_strided((size,), (1,), 0).to(dtype=dtype, device=device, copy=True)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def prepare(check: Check, case: str, dtype: torch.dtype, device: torch.device) -> Arguments:
    """Return the case's inputs in this dtype, on this device."""
    arguments: Arguments = {}
    for name, value in check.cases[case]().items():
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
    """Return the result of a function, or the argument that it mutates."""
    with torch.inference_mode():
        returned = run(**arguments)
    return returned if check.mutated is None else arguments[check.mutated].clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("check", "case"), ALL)
def test_reference_errs_at_most_twice_as_much_as_its_formula(check: Check, case: str, dtype: torch.dtype) -> None:
    """A second run gives the same bits."""
    found = verify(check, case, dtype, torch.device("cpu"))
    again = outcome(check, check.kernel.reference, prepare(check, case, dtype, torch.device("cpu")))
    assert torch.equal(again.nan_to_num(), found.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
def test_references_on_gpu(operation: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for check in checks_of(operation):
        for case in check.cases:
            for dtype in DTYPES:
                verify(check, case, dtype, torch.device("cuda"))


def verify(check: Check, case: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Compare the reference with the formula in fp64, or exactly where values are only moved; returns its result."""
    found = outcome(check, check.kernel.reference, prepare(check, case, dtype, device))
    rounded = prepare(check, case, dtype, device)
    plain = outcome(check, check.formula, prepare(check, case, dtype, device))
    if check.mutated is not None:
        assert torch.equal(found.isnan(), plain.isnan())
        assert torch.equal(found.nan_to_num(), plain.nan_to_num())
        return found
    wide = {
        name: cast(value, torch.float64, device) if isinstance(value, torch.Tensor) else value
        for name, value in rounded.items()
    }
    truth = outcome(check, check.formula, wide)
    assert found.shape == truth.shape
    assert found.dtype == dtype
    assert not found.isnan().any()
    if truth.numel():
        smallest = 2 * torch.finfo(dtype).eps * truth.abs().max()
        allowed = 2 * (plain.double() - truth).abs().max() + smallest
        assert (found.double() - truth).abs().max() <= allowed
    return found


def test_every_kernel_has_cases() -> None:
    assert {check.kernel.function for check in CHECKS} == set(KERNELS)


# --- Shapes in docstrings -----------------------------------------------------------------------


@dataclass
class Shapes:
    """A `Shapes:` section: the axes of each argument and of the result, and the size of each letter so far."""

    arguments: dict[str, list[str]]
    result: list[str] | None
    sizes: dict[str, int] = field(default_factory=dict)

    def check(self, name: str, shape: tuple[int, ...], axes: list[str]) -> None:
        """Axes are letters, numbers, products such as 2F, or at the front "..." for any."""
        if axes[0] == "...":
            axes = axes[1:]
            front = shape[: len(shape) - len(axes)]
            assert self.sizes.setdefault("...", hash(front)) == hash(front), name
            shape = shape[len(front) :]
        assert len(shape) == len(axes), f"{name} {list(shape)} is documented as {axes}"
        for size, axis in zip(shape, axes, strict=True):
            factor, letter = re.fullmatch(r"(\d*)([A-Z]?)", axis).groups()  # type: ignore[union-attr]
            expected = int(factor or 1) * (self.sizes.setdefault(letter, size // int(factor or 1)) if letter else 1)
            assert size == expected, f"axis {axis} of {name} {list(shape)} is {expected}"


def documented_shapes(function: Any) -> Shapes:
    """Return the brackets of the function's `Shapes:` section."""
    section = re.search(r"Shapes: (.*?)(?=\n\s*(?:Dtypes|Units|Mutates|Raises):|\Z| Dtypes:)", function.__doc__, re.S)
    assert section is not None, f"{function.__name__} documents no shapes"
    inputs, _, output = section.group(1).partition("->")
    arguments = {}
    for names, axes in re.findall(r"((?:\w+, )*\w+) \[([^\]]*)\]", inputs):
        arguments |= {name: re.split(r",\s*", axes) for name in names.split(", ")}
    result = re.search(r"\[([^\]]*)\]", output)
    return Shapes(arguments, re.split(r",\s*", result.group(1)) if result else None)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.kernel.function)
def test_documented_shapes_are_those_of_every_case(check: Check) -> None:
    for case in check.cases:
        shapes, arguments = documented_shapes(check.kernel), prepare(check, case, torch.float32, torch.device("cpu"))
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        assert tensors.keys() <= shapes.arguments.keys()
        for name, value in tensors.items():
            shapes.check(name, tuple(value.shape), shapes.arguments[name])
        with torch.inference_mode():
            returned = check.kernel(**arguments)
        assert (returned is None) == (shapes.result is None)
        if returned is not None:
            shapes.check("the result", tuple(returned.shape), shapes.result)
