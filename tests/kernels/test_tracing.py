"""Symbols: what is recorded, which columns a view has, and that everything else a model may do is refused."""

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from quire.kernels.activations import silu_and_mul
from quire.kernels.layer_norm import layer_norm
from quire.kernels.linear import linear
from quire.kernels.rms_norm import rms_norm
from quire.kernels.tracing import NotTraceableError, NumTokens, Symbol, Trace


def symbol(*sizes: int) -> Symbol:
    return Trace().record("hidden", (), sizes)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


def spans(*symbols: Symbol) -> list[tuple[int, int]]:
    return [(part.start, part.start + part.num_columns) for part in symbols]


def test_activation_times_the_other_half_is_a_gate() -> None:
    gate, up = symbol(10).chunk(2, 1)
    for product in (functional.gelu(gate) * up, up * functional.gelu(gate)):
        assert (product.call.operation, product.call.arguments[1], product.sizes) == ("gate", "gelu", (5,))
        assert spans(product.call.arguments[0]) == [(0, 10)]
    for product in (functional.gelu(up) * gate, gate * up, functional.gelu(gate) * gate):
        assert product.call.operation == "multiply"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4))
def test_parts_are_the_columns_that_torch_gives_them(heads: list[int], head_size: int) -> None:
    """Against the same views of a tensor whose values are their columns."""
    whole = symbol(sum(heads) * head_size)
    columns = torch.arange(whole.num_columns)[None]
    parts = whole.view(-1, sum(heads), head_size).split(heads, dim=1)
    expected = columns.view(-1, sum(heads), head_size).split(heads, dim=1)
    for part, values in zip(parts, expected, strict=True):
        assert list(range(*spans(part)[0])) == values.flatten().tolist()
        assert part.sizes == tuple(values.shape[1:])
        assert part.is_whole == (len(heads) == 1)
        assert list(range(*spans(part.flatten(1))[0])) == values.flatten().tolist()


def test_views() -> None:
    x = symbol(12)
    assert x.view(-1, 3, 4).sizes == x.reshape(x.shape[0], 3, 4).sizes == (3, 4)
    assert x.view(-1, 3, 4).flatten(1).sizes == (12,)
    assert spans(*x.chunk(3, -1)) == spans(*x.split(4, dim=1)) == [(0, 4), (4, 8), (8, 12)]
    assert spans(*x.split(4, 1)[1].split([1, 3], 1)) == [(4, 5), (5, 8)]
    assert isinstance(x.shape[0], NumTokens)
    assert x.shape[1:] == (12,)
    assert x.is_whole
    assert not x.chunk(2, 1)[0].is_whole


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda x: x.view(12, -1), "view"),
        (lambda x: x.view(-1, 3, 5), "view"),
        (lambda x: x.view(-1, 3, -1), "view"),
        (lambda x: x.view(-1, -3, -4), "view"),
        (lambda x: x.flatten(), "flatten"),
        (lambda x: x.split(4), "split along axis 0"),
        (lambda x: x.split([5, 6], dim=1), "split of 12"),
        (lambda x: x.split(5, dim=1), "split of 12"),
        (lambda x: x.chunk(5, 1), "in 5 chunks"),
        (lambda x: x.view(-1, 3, 4).split(2, -1), "split along axis -1"),
        (lambda x: x + 1, "sum"),
        (lambda x: x + symbol(6), "sum"),
        (lambda x: x + torch.zeros(12), "sum"),
        (lambda x: torch.zeros(12) + x, "add"),
        (lambda x: operator.iadd(x, x), "in place"),
        (lambda x: x == x, "comparison"),
        (lambda x: x != x, "comparison"),
        (lambda x: 1 if x else 2, "decision"),
        (lambda x: not x, "decision"),
        (lambda x: list(x), "iteration"),
        (lambda x: x in [symbol(1)], "comparison"),
        (lambda x: x.sum(), ".sum"),
        (lambda x: x.to(torch.float32), ".to"),
        (lambda x: x.dtype, ".dtype"),
        (lambda x: functional.mish(x), "mish"),
        (lambda x: functional.silu(x, inplace=True), "silu with options"),
        (lambda x: operator.imul(x, x), "in place"),
        (lambda x: x * symbol(6), "product"),
        (lambda x: x / x, "division"),
        (lambda x: torch.cat([x, x]), "cat"),
        (lambda x: functional.embedding(x, weight(4, 4), max_norm=1.0), "embedding"),
        (lambda x: linear(x, weight(4, 6), None), r"linear layer \[4, 6\] of \[T, 12\]"),
        (lambda x: linear(x.view(-1, 3, 4), weight(7, 4), None), r"of \[T, 3, 4\]"),
        (lambda x: rms_norm(x, weight(6), 1e-5), "norm"),
        (lambda x: layer_norm(x, weight(11), None, 1e-5), "norm"),
        (lambda x: silu_and_mul(x.view(-1, 2, 6)), r"gate over \[T, 2, 6\]"),
        (lambda x: silu_and_mul(symbol(5)), "gate"),
    ],
)
def test_what_a_plan_cannot_hold_is_refused_in_words(action: Any, words: str) -> None:
    with pytest.raises(NotTraceableError, match=words):
        action(symbol(12))


@pytest.mark.parametrize(
    "action",
    [
        lambda x: x - x, lambda x: x @ x, lambda x: -x, lambda x: x[0], len, float,
        int, lambda x: x < x, lambda x: 1 + x, hash, lambda x: x.shape[0] + 1, lambda x: range(x.shape[0]),
        lambda x: x.shape[7],
    ],
)  # fmt: skip
def test_other_operators_fail_too(action: Any) -> None:
    """Any error will do: `trace_model` makes one kind of them."""
    with pytest.raises((TypeError, IndexError, NotTraceableError)):
        action(symbol(12))
