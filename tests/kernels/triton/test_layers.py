"""Kernels of norms, elementwise functions, KV writes, products and inputs beside the references of `ops.py`."""

from typing import Any

import pytest
import torch

from quire._native import Activation
from quire.runtime.device.ops import OPS, KvView
from quire.runtime.device.triton_ops import TritonOps
from tests.kernels.triton.steps import BLOCK, DEVICE, TILES, describe, make_step

NONE = Activation.none
T = 5


@pytest.fixture
def ops() -> TritonOps:
    torch.manual_seed(0)
    ops = TritonOps(make_step(num_groups=2), has_drafts=False, tiles=TILES)
    ops._products = torch.full((4096,), torch.nan, device=DEVICE)
    return ops


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def check(ops: TritonOps, name: str, changed: tuple[str, ...] = ("out",), **values: Any) -> None:
    """Compare what the kernel and the reference make of the fields `changed`, from the same values before."""
    both = []
    for functions in (ops.functions, {name: OPS[name]}):
        copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
        launched = ops.num_launches
        functions[name](ops.step, **copied)
        assert ops.num_launches == launched or functions is ops.functions
        both.append([copied[field] for field in changed])
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
    assert ops.num_launches > 0


@pytest.mark.parametrize("width", [48, 42])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"weight": None},
        {"add": True},
        {"subtract_mean": True, "bias": True},
        {"groups": 3},
        {"groups": 3, "weight_per_group": True},
    ],
)
def test_norms(ops: TritonOps, width: int, form: dict[str, Any]) -> None:
    groups = form.get("groups", 1)
    of_groups = groups if form.get("weight_per_group") else 1
    values = {
        "x": rows(T, groups * width), "out": rows(T, groups * width), "weight": rows(of_groups * width), "bias": None,
        "width": width, "epsilon": 1e-5, "subtract_mean": False, "groups": 1, "add": False, "gates": None,
        "activation": NONE, "gates_first": False, "weight_per_group": False,
    }  # fmt: skip
    check(ops, "norm", **{**values, **form, "bias": rows(width) if form.get("bias") else None})


@pytest.mark.parametrize("activation", list(Activation), ids=lambda one: one.name)
@pytest.mark.parametrize("gated", [False, True])
def test_activations(ops: TritonOps, activation: Activation, gated: bool) -> None:
    x = rows(T, 140)[:, : 80 if gated else 40] * 4
    check(ops, "activate", x=x, out=rows(T, 40), width=40, activation=activation, gated=gated)


def test_rows_of_logits_and_embeddings_are_looked_up(ops: TritonOps) -> None:
    ops.step.logit_rows[:3] = torch.tensor([7, 0, 3])
    check(ops, "activate", x=rows(9, 40), out=rows(3, 40), width=40, from_logit_rows=True)
    ops.step.token_ids[:T] = torch.tensor([4, 0, 9, 9, 1])
    ops.step.positions[:T] = torch.tensor([0, 1, 2, 0, 5])
    for of_positions in (False, True):
        check(ops, "embed", table=rows(12, 24), out=rows(T, 24), offset=2, of_positions=of_positions)


def test_elementwise_functions(ops: TritonOps) -> None:
    a, b, out = rows(T, 40), rows(T, 40), rows(T, 40)
    check(ops, "add", a=a, b=b, out=out, width=40)
    check(ops, "multiply", a=a, b=b, out=out, width=40)
    check(ops, "scale", x=a, out=out, factor=3.5, by=None, width=40)
    check(ops, "scale", x=a, out=out, factor=1.0, by=rows(1), width=40)
    check(ops, "soft_cap", x=a * 9, out=out, cap=5.0, width=40)
    check(ops, "gate_rows", x=a, gates=b, out=out, per_value=True, width=40)
    check(ops, "gate_rows", x=a, gates=rows(T, 1), out=out, per_value=False, width=40)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("activation", "gated"), [(NONE, False), (Activation.gelu, False), (Activation.silu, True)])
def test_products_of_many_rows_and_of_one(
    ops: TritonOps, has_bias: bool, add: bool, activation: Activation, gated: bool
) -> None:
    n, inputs = 24, 1060
    total = 2 * n if gated else n
    weight, bias = rows(total, inputs) / 32, rows(total) if has_bias else None
    values = {"weight": weight, "bias": bias, "activation": activation, "gated": gated, "add": add}
    for num_rows in (T, 1):
        x, out = rows(num_rows, inputs), rows(num_rows, n)
        check(ops, "gemm", x=x, out=out, ahead=None, lora=None, **values)
    expected, normed, norm = out.clone(), torch.zeros_like(x), rows(inputs)
    OPS["norm"](
        ops.step, x=x, out=normed, weight=norm, bias=None, width=inputs, epsilon=1e-5, subtract_mean=False, groups=1,
        add=False, gates=None, activation=NONE, gates_first=False, weight_per_group=False,
    )  # fmt: skip
    OPS["gemm"](ops.step, x=normed, out=expected, ahead=None, lora=None, **values)
    ops.linear_row(ops.step, norm=norm, x=x, out=out, epsilon=1e-5, **values)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [16, 12])
@pytest.mark.parametrize("half", [0, 4, 6])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("own_rotation", [False, True])
def test_keys_and_values_are_written_where_they_belong(
    ops: TritonOps, size: int, half: int, normed: bool, own_rotation: bool
) -> None:
    heads, kv_heads = 6, 2
    qkv = rows(T, (heads + 2 * kv_heads) * size)
    q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], 1)
    pool = torch.full((4, 2, kv_heads, BLOCK, size), torch.nan, device=DEVICE)
    ops.step.slots[1, :T] = torch.tensor([17, 18, 40, 1, -1])
    values = {
        "q": q, "k": k, "v": v, "q_stride": 0, "k_stride": 0, "v_stride": 0, "num_heads": heads,
        "q_norm": rows(size) if normed else None, "k_norm": rows(size) if normed else None, "epsilon": 1e-5,
        "cos": rows(T, half) if half else None, "sin": rows(T, half) if half else None, "half": half,
        "q_cos": rows(T, half) if half and own_rotation else None,
        "q_sin": rows(T, half) if half and own_rotation else None,
    }  # fmt: skip
    kept, written = qkv.clone(), pool.clone()
    ops.write_kv(ops.step, **values, kv=KvView(written.transpose(2, 3), 1))
    found = q.clone()
    assert torch.equal(qkv[:, heads * size :], kept[:, heads * size :])
    qkv.copy_(kept)
    OPS["write_kv"](ops.step, **values, kv=KvView(pool.transpose(2, 3), 1))
    pool[0, :, :, 0] = torch.nan  # where the reference writes rows of padding
    torch.testing.assert_close(found, q, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(written, pool, rtol=1e-5, atol=2e-6, equal_nan=True)


def test_inputs_are_gathered_as_by_the_reference(ops: TritonOps) -> None:
    step, mine = ops.step, ops.step
    describe(step, [(5, 7, 1), (2, 31, 1), (0, 0, 9), (3, 20, 14)])
    step.tables.copy_(torch.randint(1, 64, step.tables.shape))
    step.last_tokens.copy_(torch.arange(100, 100 + len(step.last_tokens)))
    step.given.copy_(torch.randint(0, 999, step.given.shape))
    step.given[:2] = -1
    step.last_tokens[2] = -1
    made = []
    for gather in (ops.gather, step.gather):
        for tensor in (step.token_ids, step.positions, step.request_of, step.slots, step.num_tokens):
            tensor.fill_(-7)
        gather(28)
        gathered = (mine.token_ids[:28], mine.positions[:28], mine.request_of[:25], mine.slots[:, :28], mine.num_tokens)
        made.append([tensor.clone() for tensor in gathered])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert made[0][0][:2].tolist() == [105, 0]


def test_rotations_have_the_scale_of_their_position(ops: TritonOps) -> None:
    ops.step.positions[:T] = torch.tensor([0, 3, 9, 1100, 17])
    cos, sin, frequencies = rows(T, 10), rows(T, 10), torch.rand(10, device=DEVICE)
    check(ops, "rotary", ("cos", "sin"), frequencies=frequencies, cos=cos, sin=sin, half=10)
    scales = {"scales": rows(3), "num_scales": 3, "scale_period": 8}
    check(ops, "rotary", ("cos", "sin"), frequencies=frequencies, cos=cos, sin=sin, half=10, **scales)
