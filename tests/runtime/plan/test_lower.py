"""From calls to instructions: what is fused and what must not be, in which types, and random models' values."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quire import _native
from quire._native import Activation, RowType
from quire.kernels.activations import gelu, relu, silu_and_mul
from quire.kernels.linear import linear
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import rope
from quire.kernels.tracing import NotTraceableError
from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.norms import LayerNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.runtime.plan.instructions import (
    Activate,
    Add,
    Attend,
    Embed,
    Gemm,
    Norm,
    Program,
    Rotary,
    WriteKv,
    touched,
)
from quire.runtime.plan.lower import lower
from quire.runtime.plan.trace import trace_model
from tests.models.harness import Runner
from tests.runtime.plan.graphs import (
    HEAD_SIZE,
    HEADS,
    KINDS,
    VOCAB_SIZE,
    WIDTH,
    Format,
    GraphModel,
    Op,
    logits_of,
    packed,
    planned,
    program_of,
    run_prompt,
)

TOKENS = [7, 1, 18, 4, 4, 0, 11, 3, 9, 16, 2, 2, 5, 8, 13, 6, 10]


def kinds(program: Program) -> list[str]:
    return [type(instruction).__name__ for instruction in program.body]


def graph(*ops: tuple[Any, ...]) -> GraphModel:
    return GraphModel([Op(kind, inputs) for kind, *inputs in ops])  # type: ignore[arg-type]


def expected(model: GraphModel, tokens: list[int]) -> torch.Tensor:
    """Hidden states op by op."""
    runner = Runner(model, block_size=16)
    stream = runner.add(tokens)
    batch = runner.make_batch([(stream, len(tokens))])
    with torch.inference_mode():
        return model(batch.token_ids, batch)


# --- What is fused ----------------------------------------------------------------------------


def test_a_transformer_layer_has_no_instruction_that_only_moves_values() -> None:
    layer = [
        ("rms_norm", 0),
        ("attention", 1),
        ("linear", 2),
        ("add", 0, 3),
        ("rms_norm", 4),
        ("gated", 5),
        ("add", 4, 6),
    ]
    program = program_of(graph(*layer), Format.q8)
    assert kinds(program) == ["Embed", "Rotary", "Norm", "Gemm", "WriteKv", "Attend", "Gemm", "Norm", "Gemm", "Gemm"]
    embed, _, norm, qkv, write, attend, output, second_norm, up, down = program.body
    # The residual stream stays where it began, and everything that a product reads is int8.
    assert output.out is down.out is embed.out is program.hidden
    assert [item.add for item in (qkv, output, up, down)] == [False, True, False, True]
    assert up.gated
    assert up.activation == Activation.silu
    assert {buffer.type for buffer in (norm.out, attend.out, second_norm.out, up.out)} == {RowType.q8}
    assert {buffer.type for buffer in (embed.out, qkv.out)} == {RowType.f32}
    assert qkv.x is norm.out
    assert write.rotation is not None
    assert program.num_fused == {"add": 2, "silu_and_mul": 1}
    assert program.head_input.type == RowType.q8


@pytest.mark.parametrize(
    ("weight_format", "row_type"),
    [(Format.f32, "f32"), (Format.f16, "f32"), (Format.bf16, "bf16"), (Format.q4, "q8"), (Format.q4m, "q8")],
)
def test_makers_write_the_type_that_the_next_product_reads(weight_format: Any, row_type: str) -> None:
    program = program_of(graph(("rms_norm", 0), ("linear", 1), ("layer_norm", 2), ("linear", 3)), weight_format)
    assert kinds(program) == ["Embed", "Rotary", "Norm", "Gemm", "Norm", "Gemm"]
    assert program.body[2].out.type == program.body[4].out.type == RowType[row_type]
    assert program.hidden.type == RowType.f32


def test_a_value_with_two_kinds_of_readers_is_converted_once() -> None:
    """A sum, and two products which share the converted rows."""
    program = program_of(
        graph(("rms_norm", 0), ("linear", 1), ("linear", 1), ("add", 2, 3), ("add", 4, 1)), Format.bf16
    )
    conversions = [item for item in program.body if isinstance(item, Activate)]
    assert [(item.x.type, item.out.type) for item in conversions] == [(RowType.f32, RowType.bf16)]
    first, second = (item for item in program.body if isinstance(item, Gemm))
    assert first.x is second.x is conversions[0].out


def test_rows_are_converted_again_after_a_sum_in_place() -> None:
    """x, then x + linear(x) in the same memory, both read by products."""
    model = graph(("linear", 0), ("add", 0, 1), ("linear", 2), ("add", 2, 3))
    program = program_of(model, Format.bf16)
    assert kinds(program) == ["Embed", "Rotary", "Activate", "Gemm", "Activate", "Gemm"]
    assert program.body[2].x is program.body[4].x is program.hidden
    assert program.body[3].x is not program.body[5].x


def test_a_sum_is_not_made_in_rows_that_the_same_product_reads() -> None:
    program = program_of(graph(("linear", 0), ("add", 0, 1)), Format.f32)
    assert kinds(program) == ["Embed", "Rotary", "Gemm", "Add"]


@pytest.mark.parametrize(
    ("ops", "added"),
    [
        # x + linear(norm(x)): the one case of most models.
        ([("rms_norm", 0), ("linear", 1), ("add", 0, 2)], [True]),
        ([("rms_norm", 0), ("linear", 1), ("add", 2, 0)], [True]),
        # Two branches of one normed value: both add to the residual.
        ([("rms_norm", 0), ("linear", 1), ("add", 0, 2), ("linear", 1), ("add", 3, 4)], [True, True]),
        # x is normed again between the product and its sum; the other sum's first term comes after its product.
        (
            [("rms_norm", 0), ("linear", 1), ("rms_norm", 0), ("linear", 3), ("add", 0, 2), ("add", 5, 4)],
            [False, False],
        ),
        # x + attention(norm(x)) + gated(norm(x)), as parallel blocks have it: the second sum may be in place.
        (
            [
                ("rms_norm", 0),
                ("attention", 1),
                ("linear", 2),
                ("add", 0, 3),
                ("rms_norm", 0),
                ("gated", 5),
                ("add", 4, 6),
            ],
            [False, False, False, True],
        ),
        # The old x is added once more at the end.
        ([("rms_norm", 0), ("linear", 1), ("add", 0, 2), ("add", 3, 0)], [False]),
        # The product is read by another than the sum.
        ([("rms_norm", 0), ("linear", 1), ("add", 0, 2), ("relu", 2), ("add", 3, 4)], [False]),
        # Two products: the second adds to the first one's rows.
        ([("linear", 0), ("linear", 0), ("add", 1, 2)], [False, True]),
        ([("linear", 0), ("add", 1, 1)], [False]),
        # An activation stands between.
        ([("rms_norm", 0), ("activated", 1), ("add", 0, 2)], [False]),
    ],
)
def test_sums_are_made_in_place_only_where_nobody_reads_the_old_value(ops: Any, added: list[bool]) -> None:
    model = graph(*ops)
    program = program_of(model, Format.f32)
    assert [item.add for item in program.body if isinstance(item, Gemm)] == added
    torch.testing.assert_close(run_prompt(planned(model), TOKENS), expected(model, TOKENS))


def test_activations_are_fused_into_the_product_before_them() -> None:
    program = program_of(graph(("activated", 0), ("linear", 1)), Format.f32)
    assert [(item.activation, item.gated) for item in program.body if isinstance(item, Gemm)] == [
        (Activation.relu, False), (Activation.none, False),
    ]  # fmt: skip


def test_an_activation_with_other_readers_of_its_input_stands_alone() -> None:
    model = graph(("linear", 0), ("gelu", 1), ("add", 1, 2))
    assert kinds(program_of(model)) == ["Embed", "Rotary", "Gemm", "Activate", "Add"]
    torch.testing.assert_close(run_prompt(planned(model), TOKENS), expected(model, TOKENS))


class Custom(nn.Module):
    """`body`: what a test does between embedding and result."""

    num_layers = 1

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCAB_SIZE, WIDTH), requires_grad=False)
        self.head = Linear(WIDTH, VOCAB_SIZE)
        self.qkv = Linear(WIDTH, (HEADS + 2) * HEAD_SIZE)
        self.norm, self.layer_norm = RMSNorm(HEAD_SIZE, 1e-5), LayerNorm(HEAD_SIZE, 1e-5, affine=True)
        self.attention = Attention(0, HEAD_SIZE)
        self.rotary = RotaryEmbedding(torch.ones(HEAD_SIZE // 2))
        self.others = nn.ModuleDict(modules)

    def forward(self, token_ids: Any, batch: Any) -> Any:
        return self.body(nn.functional.embedding(token_ids, self.table), batch)

    def compute_logits(self, hidden: Any) -> Any:
        return self.head(hidden)

    def heads(self, x: Any) -> list[Any]:
        return self.qkv(x).view(-1, HEADS + 2, HEAD_SIZE).split([HEADS, 1, 1], dim=1)


def custom(body: Any, **methods: Any) -> Custom:
    return type("Changed", (Custom,), {"body": body, **methods})()


def test_a_gate_over_part_tiles_stands_alone() -> None:
    """The two halves of a product's tiles must begin with a tile."""

    def body(self: Any, x: Any, batch: Any) -> Any:
        return self.others["down"](silu_and_mul(self.others["up"](x)))

    class Odd(Custom):
        def __init__(self) -> None:
            super().__init__(up=Linear(WIDTH, 80), down=Linear(40, WIDTH))

    Odd.body = body  # type: ignore[attr-defined]
    assert kinds(program_of(Odd(), Format.f32)) == ["Embed", "Gemm", "Activate", "Gemm"]


def test_an_activation_of_a_part_is_not_taken_for_one_of_all() -> None:
    def body(self: Any, x: Any, batch: Any) -> Any:
        return relu(self.others["up"](x).chunk(2, 1)[1])

    class Half(Custom):
        def __init__(self) -> None:
            super().__init__(up=Linear(WIDTH, 2 * WIDTH))

    Half.body = body  # type: ignore[attr-defined]
    with pytest.raises(NotTraceableError, match="a use of the result of linear"):
        program_of(Half())


def test_norms_of_heads_and_rotation_become_part_of_the_write() -> None:
    def body(self: Any, x: Any, batch: Any) -> Any:
        q, k, v = self.heads(x)
        cos, sin = self.rotary(batch.positions)
        return self.attention(rope(self.norm(q), cos, sin), rope(self.norm(k), cos, sin), v, batch).flatten(1)

    program = program_of(custom(body))
    assert kinds(program) == ["Embed", "Gemm", "Rotary", "WriteKv", "Attend"]
    write = next(item for item in program.body if isinstance(item, WriteKv))
    attend = next(item for item in program.body if isinstance(item, Attend))
    rotary = next(item for item in program.body if isinstance(item, Rotary))
    assert (write.q.start, write.k.start, write.v.start) == (0, HEADS * HEAD_SIZE, (HEADS + 1) * HEAD_SIZE)
    assert write.q_norm is write.k_norm is not None
    assert write.epsilon == 1e-5
    assert write.rotation == (rotary.cos, rotary.sin)
    assert attend.q == write.q
    assert (attend.num_heads, attend.window) == (HEADS, 0)


def body_of_heads(change: Any) -> Any:
    """Attention of queries, keys and values as `change(self, q, k, v, rotation, batch)` returns them."""

    def body(self: Any, x: Any, batch: Any) -> Any:
        q, k, v = change(self, *self.heads(x), self.rotary(batch.positions), batch)
        return self.attention(q, k, v, batch).flatten(1)

    return body


def twice(self: Any, x: Any, batch: Any) -> Any:
    q, k, v = self.heads(x)
    first = self.attention(q, k, v, batch)
    batch.kv_caches[1]
    second = Attention(1, HEAD_SIZE)(q, k, v, batch)
    return (first + second).flatten(1)


def not_written(self: Any, x: Any, batch: Any) -> Any:
    from quire.kernels.paged_attention import paged_attention

    q, _, _ = self.heads(x)
    return paged_attention(q, batch.kv_caches[0], batch, 0, 1.0, None).flatten(1)


def wrong_group(self: Any, x: Any, batch: Any) -> Any:
    from quire.kernels.paged_attention import paged_attention
    from quire.kernels.write_kv import write_kv

    q, k, v = self.heads(x)
    write_kv(k, v, batch.kv_caches[0], batch.slot_mapping[0])
    return paged_attention(q, batch.kv_caches[0], batch, 1, 1.0, None).flatten(1)


def of_the_input(self: Any, x: Any, batch: Any) -> Any:
    q, k = x.view(-1, 2, HEAD_SIZE).split(1, 1)
    return linear(Attention(0, HEAD_SIZE)(q, k, k, batch).flatten(1), self.others["up"].weight, None)


def partly_rotated(self: Any, x: Any, batch: Any) -> Any:
    rotation = RotaryEmbedding(torch.ones(HEAD_SIZE // 4))(batch.positions)
    q, k, v = self.heads(x)
    return self.attention(rope(q, *rotation), rope(k, *rotation), v, batch).flatten(1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (body_of_heads(lambda self, q, k, v, r, b: (rope(q, *r), k, v)), "not prepared alike"),
        (body_of_heads(lambda self, q, k, v, r, b: (q, k, rope(v, *r))), "not prepared alike"),
        (body_of_heads(lambda self, q, k, v, r, b: (self.norm(q), k, v)), "norms of queries and keys that differ"),
        (body_of_heads(lambda self, q, k, v, r, b: (q, k, self.norm(v))), "not prepared alike"),
        (body_of_heads(lambda self, q, k, v, r, b: (rope(rope(q, *r), *r), rope(rope(k, *r), *r), v)), "other things"),
        (body_of_heads(lambda self, q, k, v, r, b: (self.norm(rope(q, *r)), self.norm(rope(k, *r)), v)), "to other"),
        (body_of_heads(lambda self, q, k, v, r, b: (rope(q, *r[::-1]), rope(k, *r[::-1]), v)), "other angles"),
        (body_of_heads(lambda self, q, k, v, r, b: (q, v, v)), "share columns"),
        (body_of_heads(lambda self, q, k, v, r, b: (q, q.split([1, 1], 1)[1], v)), "share columns"),
        (body_of_heads(lambda self, q, k, v, r, b: (self.layer_norm(q), self.layer_norm(k), v)), "layer norm of heads"),
        (body_of_heads(lambda self, q, k, v, r, b: (relu(q), k, v)), "a use of the result of linear"),
        (of_the_input, "attention to other things than a projection"),
        (twice, "a second attention to one projection"),
        (not_written, "a cache not written"),
        (wrong_group, "another cache"),
        (partly_rotated, "rotation of a part"),
        (lambda self, x, batch: self.attention(*self.heads(x), batch).flatten(1) + self.attention(
            *self.heads(x), batch).flatten(1), "a second write"),
        (lambda self, x, batch: nn.functional.embedding(self.rotary(batch.positions)[0], self.table), "embedding of"),
        (lambda self, x, batch: x + self.rotary(batch.positions)[0].view(-1, 16), "sum of other"),
        (lambda self, x, batch: self.norm(x.view(-1, 2, 16)).flatten(1) + x, "a use of the result of rms_norm"),
        (lambda self, x, batch: linear(self.qkv(x).split(16, 1)[0], self.others["up"].weight, None), "part of"),
    ],
)  # fmt: skip
def test_what_has_no_instruction_is_refused(body: Any, words: str) -> None:
    model = custom(body)
    model.others["up"] = Linear(HEAD_SIZE, WIDTH)
    with pytest.raises(NotTraceableError, match=words):
        program_of(model, num_layers=2)


@pytest.mark.parametrize(
    "compute_logits",
    [
        lambda self, hidden: hidden,
        lambda self, hidden: relu(self.head(hidden)),
        lambda self, hidden: self.head(gelu(hidden)),
        lambda self, hidden: self.head(rms_norm(hidden, self.others["norm"].weight, 1e-5)),
    ],
)
def test_a_head_is_one_linear_layer(compute_logits: Any) -> None:
    model = custom(lambda self, x, batch: x, compute_logits=compute_logits)
    model.others["norm"] = RMSNorm(WIDTH, 1e-5)
    with pytest.raises(NotTraceableError, match="a head that is more than one linear layer"):
        program_of(model)


def test_positions_may_be_shifted_and_embedded() -> None:
    def body(self: Any, x: Any, batch: Any) -> Any:
        return x + nn.functional.embedding(batch.positions + 2 + 1, self.table)

    tokens, positions = (item for item in program_of(custom(body)).body if isinstance(item, Embed))
    assert (tokens.of_positions, tokens.offset) == (False, 0)
    assert (positions.of_positions, positions.offset) == (True, 3)


def test_formats_of_each_weight_decide_alone() -> None:
    """One product in fp32, the next in 4 bit: each gets its own type of rows."""
    model = graph(("rms_norm", 0), ("linear", 1), ("linear", 1))
    formats = {id(model.weight_1): Format.bf16, id(model.weight_2): Format.q4m}
    program = lower(trace_model(model, (0,)), lambda parameter: formats.get(id(parameter), Format.f32))
    types = {item.weight: item.x.type for item in program.body if isinstance(item, Gemm)}
    assert types == {model.weight_1: RowType.bf16, model.weight_2: RowType.q8}
    norm = next(item for item in program.body if isinstance(item, Norm))
    assert norm.out.type == RowType.f32


# --- Random models ----------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> list[Op]:
    """Operations on recent values and on old ones, some of them never used."""
    ops = []
    for index in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(KINDS))
        recent = st.integers(max(0, index - 2), index)
        count = 2 if kind == "add" else 1
        ops.append(Op(kind, tuple(draw(st.one_of(recent, st.integers(0, index))) for _ in range(count))))
    return ops


def as_int8(x: torch.Tensor) -> torch.Tensor:
    """Rounded as int8 rows are: per 32 values to multiples of their largest / 127."""
    blocks = x.view(len(x), -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (blocks / scale).round() * scale, 0.0).view(x.shape)


def as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


@pytest.mark.parametrize(
    ("weight_format", "rounded", "tolerance"),
    [(Format.f32, lambda x: x, 1e-5), (Format.bf16, as_bfloat16, 0.02), (Format.q8, as_int8, 0.05)],
    ids=["f32", "bf16", "q8"],
)
def test_random_models_have_the_values_that_they_have_op_by_op(
    weight_format: Any, rounded: Any, tolerance: float
) -> None:
    """Whatever was fused, converted and placed where: an old value read too late would be wrong by its own size."""

    @settings(max_examples=60)
    @given(graphs())
    def check(ops: list[Op]) -> None:
        model = GraphModel(ops, rounded)
        plan = planned(model, weight_format)
        found = run_prompt(plan, TOKENS)
        if weight_format != Format.f32:
            use_packed_values(model, weight_format)
        wanted = expected(model, TOKENS)
        assert (found - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))
        logits = model.compute_logits(found[[2, 16]])
        torch.testing.assert_close(logits_of(plan, [2, 16]), logits, rtol=1e-4, atol=1e-4)

    check()


def use_packed_values(model: GraphModel, weight_format: Any) -> None:
    """Give a model the values of its weights that a plan computes with."""
    weights = packed(model, weight_format)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            num_rows = len(parameter)
            values = torch.zeros(parameter.shape)
            plan = _native.Plan(1, num_rows, 1)
            plan.embed(
                weights.weight(parameter), _native.Rows(values.data_ptr(), 4 * parameter.shape[1], RowType.f32), 0
            )
            ids, zero, count = (torch.tensor(v, dtype=torch.int32) for v in (range(num_rows), [0], [num_rows]))
            plan.run(1, 1, 0, zero.data_ptr(), zero.data_ptr(), count.data_ptr(), 0, ids.data_ptr(), num_rows, 0, 0, 0)
            parameter.data = values


def test_touched_names_every_buffer() -> None:
    program = program_of(graph(("attention", 0), ("linear", 1), ("add", 0, 2), ("relu", 3), ("add", 3, 4)))
    by_kind = {type(item).__name__: len(set(touched(item))) for item in program.body}
    assert by_kind == {"Embed": 1, "Rotary": 2, "Gemm": 2, "WriteKv": 3, "Attend": 2, "Activate": 2, "Add": 3}
    assert isinstance(program.body[-1], Add)
