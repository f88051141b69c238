"""Ops that go through rows value by value, of any width: norms, activations, sums, changes of type."""

from functools import partial

import numpy as np
import pytest
import torch

from quire import _native
from tests.kernels.native.packed_weights import each_isa, empty_rows, rows_of, run

WIDTHS = [1, 15, 16, 33, 300]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def check_type(found: np.ndarray, exact: np.ndarray, width: int) -> None:
    """fp32 or bf16 rows of `empty_rows` hold the fp32 values, an odd bf16 row a zero after them, and nothing more."""
    if found.dtype == np.uint16:
        exact = torch.from_numpy(exact).bfloat16().view(torch.uint16).numpy()
        if width % 2:
            assert (found[:, width] == 0).all()
            width += 1
    np.testing.assert_array_equal(found[:, : exact.shape[1]], exact)
    assert (found[:, width:].view(np.uint8) == 0xFF).all()


def run_for_logit_rows(plan: _native.Plan, logit_rows: np.ndarray) -> None:
    """Run one request of four tokens, two of which need logits."""
    arrays = [np.array(values, np.int32) for values in ([0], [0], [4], [[0] * 4])]
    row, start, count, tokens = (array.ctypes.data for array in arrays)
    plan.run(1, 1, 2, row, start, count, logit_rows.ctypes.data, tokens, 4, 0, 0, 0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
def test_norms_are_their_formula(width: int, subtract_mean: bool, has_weights: bool) -> None:
    x, weight, bias = normal(5, width) * 0.05 + 0.02, normal(width, seed=1), normal(width, seed=2)
    epsilon = 1e-3  # beside a mean of squares of about as much
    wide = x.astype(np.float64)
    wide -= wide.mean(1, keepdims=True) if subtract_mean else 0
    wanted = wide / np.sqrt((wide**2).mean(1, keepdims=True) + epsilon)
    if has_weights:
        wanted = wanted * weight + bias

    def normalise(kind: str) -> np.ndarray:
        out = empty_rows(kind, 5, width)
        plan = _native.Plan(2, 5, 1)
        plan.norm(
            rows_of(x), rows_of(out), address(weight if has_weights else None), address(bias if has_weights else None),
            width, epsilon, subtract_mean,
        )  # fmt: skip
        run(plan, np.zeros(5))
        return out

    exact = normalise("f32")
    np.testing.assert_allclose(exact[:, :width], wanted, rtol=2e-6, atol=2e-6)
    for kind in ("f32", "bf16"):
        for found in each_isa(lambda: normalise(kind)):  # noqa: B023
            check_type(found, exact[:, :width], width)


@pytest.mark.parametrize("width", [3, 16, 100])
@pytest.mark.parametrize("gates_first", [False, True])
def test_gated_norms_have_the_bits_of_their_parts(width: int, gates_first: bool) -> None:
    """Of three groups, whose values are multiplied by the activation of gates before or behind the norm."""
    x, gates, weight = normal(5, 3 * width), normal(5, 3 * width + 2, seed=1), normal(width, seed=2)
    common = {"weight": weight.ctypes.data, "bias": 0, "width": width, "groups": 3, "epsilon": 1e-5}
    silu = {"activation": _native.Activation.silu}

    def normalise(fused: bool) -> np.ndarray:
        first, second, out = (empty_rows("f32", 5, 3 * width) for _ in range(3))
        plan = _native.Plan(2, 5, 1)
        norm = partial(plan.norm, **common, subtract_mean=False)
        if fused:
            norm(x=rows_of(x), out=rows_of(out), gates=rows_of(gates), gates_first=gates_first, **silu)
        else:
            plan.activate(x=rows_of(gates), out=rows_of(first), width=3 * width, gated=False, **silu)
            if not gates_first:
                norm(x=rows_of(x), out=rows_of(second))
            a, b = rows_of(first), rows_of(x if gates_first else second)
            plan.multiply(a=a, b=b, out=rows_of(second if gates_first else out), width=3 * width)
            if gates_first:
                norm(x=rows_of(second), out=rows_of(out))
        run(plan, np.zeros(5))
        return out[:, : 3 * width]

    wanted = normalise(fused=False)
    for found in each_isa(lambda: normalise(fused=True)):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("width", [*WIDTHS, 256, 600])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_activations_of_rows_that_are_shared_by_threads(width: int, gated: bool, kind: str) -> None:
    x = normal(4, 2 * width if gated else width)
    logit_rows = np.array([3, 1], np.int32)

    def activate(num_threads: int) -> np.ndarray:
        out = empty_rows(kind, 2, width)
        plan = _native.Plan(num_threads, 4, 4)
        plan.activate(
            rows_of(x), rows_of(out), width, _native.Activation.relu, gated, of_logit_rows=True, from_logit_rows=True
        )
        run_for_logit_rows(plan, logit_rows)
        return out

    wanted = np.maximum(x[logit_rows, :width], 0) * (x[logit_rows, width:] if gated else 1)
    for num_threads in (1, 2, 5):
        for found in each_isa(lambda: activate(num_threads)):  # noqa: B023
            check_type(found, wanted, width)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activations_of_extreme_values(activation: str) -> None:
    """Values far below zero vanish, values far above stay, and no finite value becomes infinite."""
    x = np.array([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e12, np.inf, np.nan]], np.float32)

    def activate() -> np.ndarray:
        out = np.zeros_like(x)
        plan = _native.Plan(1, 1, 1)
        plan.activate(rows_of(x), rows_of(out), x.shape[1], getattr(_native.Activation, activation))
        run(plan, np.zeros(1))
        return out

    for (found,) in each_isa(activate):
        assert (np.abs(found[:3]) < 1e-35).all(), found
        np.testing.assert_array_equal(found[3:8], x[0, 3:8])
        assert np.isnan(found[8])


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_rows(width: int) -> None:
    a, b = normal(7, width), normal(7, width, seed=1)
    for num_threads in (1, 3):
        out = empty_rows("f32", 7, width)
        plan = _native.Plan(num_threads, 7, 1)
        plan.add(rows_of(a), rows_of(b), rows_of(out), width)
        run(plan, np.zeros(7))
        check_type(out, a + b, width)


def test_rounding_to_bf16_is_torchs_for_every_kind_of_value() -> None:
    """Ties, denormals, infinities and NaN of any payload, in whole vectors and after the last of them."""
    random = np.random.default_rng(1)
    bits = random.integers(0, 2**32, (64, 263), dtype=np.uint32)
    bits[::2] &= 0xFFFF_8000  # ties
    bits[:, 250:] |= 0x7F80_0000  # infinities, and NaN whose payloads would overflow
    bits[0, 240:250] = 0x7FFF_FFFF
    values = bits.view(np.float32)

    def narrow() -> np.ndarray:
        out = empty_rows("bf16", 64, 263)
        plan = _native.Plan(1, 64, 1)
        plan.activate(rows_of(values), rows_of(out), 263)
        run(plan, np.zeros(64))
        return out[:, :263]

    wanted = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    nan = np.isnan(values)
    for found in each_isa(narrow):
        np.testing.assert_array_equal(found[~nan], wanted[~nan])
        assert ((found[nan] & 0x7FFF) > 0x7F80).all(), "NaN stays NaN"


@pytest.mark.parametrize("width", [1, 16, 33, 600])
@pytest.mark.parametrize("op", ["scale", "multiply", "gate_rows", "soft_cap", "norm of groups"])
def test_elementwise_ops_are_their_formula_in_any_type_and_for_logit_rows(op: str, width: int) -> None:
    a, b = normal(4, 3 * width)[:, width : 2 * width], normal(4, width, seed=1) * 3
    logit_rows = np.array([3, 1], np.int32)
    wanted = {
        "scale": lambda: np.float32(0.3) * a,
        "multiply": lambda: a * b,
        "gate_rows": lambda: a / (1 + np.exp(-b[:, :1])),
        "soft_cap": lambda: (2 * np.tanh(a.astype(np.float64) / 2)).astype(np.float32),
        "norm of groups": lambda: np.sign(a) * np.abs(a) / np.sqrt(a**2 + np.float32(0.1)),  # groups of one value
    }[op]()

    def compute(kind: str, of_logit_rows: bool) -> np.ndarray:
        out = empty_rows(kind, 4, width)
        plan = _native.Plan(2, 4, 4)
        x = _native.Rows(a.ctypes.data, a.strides[0], _native.RowType.f32)
        fields: dict[str, object] = {"out": rows_of(out), "width": width, "of_logit_rows": of_logit_rows}
        if op == "scale":
            plan.scale(x=x, factor=0.3, **fields)
        elif op == "multiply":
            plan.multiply(a=x, b=rows_of(b), **fields)
        elif op == "gate_rows":
            plan.gate_rows(x=x, gates=rows_of(b), **fields)
        elif op == "soft_cap":
            plan.soft_cap(x=x, cap=2.0, **fields)
        else:
            plan.norm(x=x, **fields | {"width": 1, "groups": width, "epsilon": 0.1})
        run_for_logit_rows(plan, logit_rows)
        return out

    exact = compute("f32", False)
    np.testing.assert_allclose(exact[:, :width], wanted, rtol=3e-6, atol=3e-7)
    for kind in ("f32", "bf16"):
        for found in each_isa(lambda: compute(kind, False)):  # noqa: B023
            check_type(found, exact[:, :width], width)
    of_logits = compute("f32", True)
    np.testing.assert_array_equal(of_logits[:2], exact[:2])
    assert (of_logits[2:].view(np.uint8) == 0xFF).all()
