"""From calls to instructions: what is fused and what must not be, in which types, and random models' values."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quire._native import Activation, RowType
from quire.cache_spec import PagedKV
from quire.kernels.activations import gelu, relu, silu, silu_and_mul
from quire.kernels.elementwise import Scale, SoftCap, soft_cap
from quire.kernels.instruction import Columns, Packing
from quire.kernels.linear import Gemm, linear
from quire.kernels.paged_attention import Attend, WriteKv, paged_attention, write_kv
from quire.kernels.rms_norm import Norm
from quire.kernels.rope import Rotary, rope
from quire.kernels.tracing import NotTraceableError
from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.norms import LayerNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.nn import named_parameters
from quire.runtime.eager import give_memory
from quire.runtime.plan.emit import GREEDY
from quire.runtime.plan.lower import Program, lower
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
from tests.runtime.plan.harness import decoded

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


def test_transformer_layer_has_no_instruction_that_only_moves_values() -> None:
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
    assert qkv.x == Columns(norm.out, 0, WIDTH)
    assert write.rotation is not None
    assert program.num_fused == {"add": 2, "gate": 1}
    assert program.head[0].out.type == RowType.q8


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


def fill(*modules: Any) -> None:
    """Give modules random weights."""
    for module in modules:
        give_memory(module, torch.float32, torch.device("cpu"), lambda shape, **_: torch.randn(shape))


class Custom(nn.Module):
    """`body`: what a test does between embedding and result."""

    num_layers = 2

    def __init__(self, **modules: Any) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCAB_SIZE, WIDTH), requires_grad=False)
        self.head = Linear(WIDTH, VOCAB_SIZE)
        self.qkv, self.keys = Linear(WIDTH, (HEADS + 2) * HEAD_SIZE), Linear(WIDTH, HEAD_SIZE)
        self.norm, self.layer_norm = RMSNorm(HEAD_SIZE, 1e-5), LayerNorm(HEAD_SIZE, 1e-5, affine=True)
        self.wide_norm = RMSNorm((HEADS + 2) * HEAD_SIZE, 1e-5)
        self.attention, self.other_attention = Attention(0, HEAD_SIZE), Attention(1, HEAD_SIZE)
        self.capped = Attention(0, HEAD_SIZE, soft_cap=0.5)
        self.rotary = RotaryEmbedding(1.0 / 100.0 ** (torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2)))
        self.partial_rotary = RotaryEmbedding(torch.tensor([1.0, 0.1, 0.01]))
        for name, module in modules.items():
            setattr(self, name, module)
        fill(self)
        generator = torch.Generator().manual_seed(3)
        for _, parameter in named_parameters(self):
            parameter.data.normal_(float(parameter.ndim == 1), parameter.shape[-1] ** -0.5, generator=generator)
        self.config = SimpleNamespace(
            num_layers=2, num_kv_heads=1, head_size=HEAD_SIZE, kv_specs=lambda: [PagedKV(1, HEAD_SIZE, 4)] * 2
        )

    def forward(self, token_ids: Any, batch: Any) -> Any:
        return self.body(nn.functional.embedding(token_ids, self.table), batch)

    def compute_logits(self, hidden: Any) -> Any:
        return self.head(hidden)

    def heads(self, x: Any) -> list[Any]:
        return self.qkv(x).view(-1, HEADS + 2, HEAD_SIZE).split([HEADS, 1, 1], dim=1)


def custom(body: Any, **methods: Any) -> Custom:
    return type("Changed", (Custom,), {"body": body, **methods})()


def test_gate_over_part_tiles_stands_alone() -> None:
    """The two halves of a product's tiles must begin with a tile."""

    def body(self: Any, x: Any, batch: Any) -> Any:
        return self.down(silu_and_mul(self.up(x)))

    class Odd(Custom):
        def __init__(self) -> None:
            super().__init__(up=Linear(WIDTH, 80), down=Linear(40, WIDTH))

    Odd.body = body  # type: ignore[attr-defined]
    assert kinds(program_of(Odd(), Format.f32)) == ["Embed", "Gemm", "Activate", "Gemm"]


def test_activation_of_a_part_is_not_taken_for_one_of_all() -> None:
    def body(self: Any, x: Any, batch: Any) -> Any:
        return relu(self.qkv(x).split([WIDTH, WIDTH], 1)[1])

    check_values(custom(body), ["Embed", "Gemm", "Activate"])


def check_values(model: Custom, wanted_kinds: list[str] | None = None) -> None:
    """Check that a plan's hidden states are those that the model has op by op."""
    if wanted_kinds is not None:
        assert kinds(program_of(model)) == wanted_kinds
    torch.testing.assert_close(run_prompt(planned(model), TOKENS), expected(model, TOKENS))  # type: ignore[arg-type]


def gated_norm(self: Any, a: Any, gates: Any) -> Any:
    return self.norm((a * gates()).view(-1, 2, HEAD_SIZE)).flatten(1)


def norm_gated(self: Any, a: Any, gates: Any) -> Any:
    return self.norm(a.view(-1, 2, HEAD_SIZE)).flatten(1) * gates()


@pytest.mark.parametrize("body", [gated_norm, norm_gated])
def test_gates_become_part_of_the_norm_that_alone_reads_them(body: Any) -> None:
    def alone(self: Any, x: Any, batch: Any) -> Any:
        a, z = self.qkv(x).split([WIDTH, WIDTH], 1)
        return body(self, a, lambda: silu(z))

    def gates_read_again(self: Any, x: Any, batch: Any) -> Any:
        a, z = self.qkv(x).split([WIDTH, WIDTH], 1)
        gates = silu(z)
        return body(self, a, lambda: gates) + gates

    def product_read_again(self: Any, x: Any, batch: Any) -> Any:
        a, z = self.qkv(x).split([WIDTH, WIDTH], 1)
        product = a * silu(z)
        return body(self, product, lambda: silu(z)) + product

    def gates_known_before(self: Any, x: Any, batch: Any) -> Any:
        a, z = self.qkv(x).split([WIDTH, WIDTH], 1)
        gates = silu(z)
        return body(self, relu(a), lambda: gates)

    check_values(custom(alone), ["Embed", "Gemm", "Norm"])
    (norm,) = [item for item in program_of(custom(alone)).body if isinstance(item, Norm)]
    assert (norm.gates_first, norm.activation, norm.groups) == (body is gated_norm, Activation.silu, 2)
    assert {"Activate", "Multiply"} < set(kinds(program_of(custom(gates_read_again))))
    assert "Activate" in kinds(program_of(custom(gates_known_before)))
    for other in (gates_read_again, product_read_again, gates_known_before):
        check_values(custom(other))


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


def body_of_heads(change: Any, attention: str = "attention") -> Any:
    """Attention of queries, keys and values as `change(self, q, k, v, rotation, x)` returns them."""

    def body(self: Any, x: Any, batch: Any) -> Any:
        q, k, v = change(self, *self.heads(x), self.rotary(batch.positions), x)
        return getattr(self, attention)(q, k, v, batch).flatten(1)

    return body


def separate(self: Any, q: Any, k: Any, v: Any, r: Any, x: Any) -> Any:
    keys = self.keys(x).view(-1, 1, HEAD_SIZE)
    return rope(q, *r), rope(keys, *r), v


def normed_whole(self: Any, x: Any, batch: Any) -> Any:
    q, k, v = self.wide_norm(self.qkv(x)).view(-1, HEADS + 2, HEAD_SIZE).split([HEADS, 1, 1], dim=1)
    r = self.rotary(batch.positions)
    return self.attention(rope(q, *r), rope(k, *r), v, batch).flatten(1)


def partly_rotated(self: Any, x: Any, batch: Any) -> Any:
    rotation = self.partial_rotary(batch.positions)
    q, k, v = self.heads(x)
    return self.attention(rope(q, *rotation), rope(k, *rotation), v, batch).flatten(1)


def twice(self: Any, x: Any, batch: Any) -> Any:
    q, k, v = self.heads(x)
    r = self.rotary(batch.positions)
    first = self.attention(rope(q, *r), k, v, batch)
    return (first + self.other_attention(rope(q, *r), k, v, batch)).flatten(1)


def of_the_input(self: Any, x: Any, batch: Any) -> Any:
    q = x.view(-1, 2, HEAD_SIZE)
    k = q.split(1, 1)[1]
    return self.attention(q, k, k, batch).flatten(1)


IN_PLACE = ["Embed", "Gemm", "Rotary", "WriteKv", "Attend"]


def attends_again(self: Any, x: Any, batch: Any) -> Any:
    q, k, v = self.heads(x)
    first = self.attention(q, k, v, batch)
    return first.flatten(1) + paged_attention(q, batch.kv_caches[0], batch, 0, 1.0, None).flatten(1)


@pytest.mark.parametrize(
    ("body", "wanted_kinds"),
    [
        (partly_rotated, ["Embed", "Rotary", "Gemm", "WriteKv", "Attend"]),
        (body_of_heads(separate), ["Embed", "Gemm", "Rotary", "Gemm", "WriteKv", "Attend"]),
        (normed_whole, ["Embed", "Gemm", "Norm", "Rotary", "WriteKv", "Attend"]),
        (body_of_heads(lambda s, q, k, v, r, x: (rope(q, *r), rope(k, *r), v), "capped"), IN_PLACE),
        (
            body_of_heads(lambda s, q, k, v, r, x: (rope(q, *r), k, v)),
            ["Embed", "Gemm", "Rotary", "Rope", "WriteKv", "Attend"],
        ),
        (body_of_heads(lambda s, q, k, v, r, x: (q, k, rope(v, *r))), None),
        (body_of_heads(lambda s, q, k, v, r, x: (s.norm(q), k, v)), None),
        (body_of_heads(lambda s, q, k, v, r, x: (q, k, s.norm(v))), None),
        (body_of_heads(lambda s, q, k, v, r, x: (rope(rope(q, *r), *r), rope(rope(k, *r), *r), v)), None),
        (body_of_heads(lambda s, q, k, v, r, x: (s.norm(rope(q, *r)), s.norm(rope(k, *r)), v)), None),
        (body_of_heads(lambda s, q, k, v, r, x: (q, v, v)), None),
        (body_of_heads(lambda s, q, k, v, r, x: (q, rope(v, *r), rope(v, *r))), None),
        (body_of_heads(lambda s, q, k, v, r, x: (q, q.split([1, 1], 1)[1], v)), None),
        (body_of_heads(lambda s, q, k, v, r, x: (s.layer_norm(q), s.layer_norm(k), v)), None),
        (body_of_heads(lambda s, q, k, v, r, x: (relu(q), k, v)), None),
        (body_of_heads(lambda s, q, k, v, r, x: (q * 0.25, k, v)), None),
        (of_the_input, None),
        (twice, None),
        (attends_again, None),
        (lambda self, x, batch: self.norm(x.view(-1, 2, 16)).flatten(1) + x, ["Embed", "Norm", "Add"]),
        (lambda self, x, batch: x + self.wide(self.up(x)), ["Embed", "Gemm", "Norm"]),
        (lambda self, x, batch: self.wide(self.up(x)) + x, ["Embed", "Gemm", "Norm"]),
        (lambda self, x, batch: x + self.wide(x), ["Embed", "Norm", "Add"]),
        (lambda self, x, batch: (x + self.wide(self.up(x))) * x,
         ["Embed", "Gemm", "Norm", "Add", "Multiply"]),
        (lambda self, x, batch: linear(self.qkv(x).split(WIDTH, 1)[1], self.up.weight, None), None),
        (lambda self, x, batch: soft_cap(x * 3.0, 2.0) * x / 2, ["Embed", "Scale", "SoftCap", "Multiply", "Scale"]),
    ],
)  # fmt: skip
def test_any_preparation_of_heads_and_values_is_planned(body: Any, wanted_kinds: Any) -> None:
    model = custom(body)
    model.up, model.wide = Linear(WIDTH, WIDTH), RMSNorm(WIDTH, 1e-5)
    fill(model.up, model.wide)
    check_values(model, wanted_kinds)


@pytest.mark.parametrize("weight_format", [Format.q8, Format.bf16])
def test_queries_that_two_attentions_read_stay_whole(weight_format: Any) -> None:
    """Heads of 16 columns, so that attention that writes int8 keeps results in the queries' memory."""

    def body(self: Any, x: Any, batch: Any) -> Any:
        q, k, v = self.heads(x)
        first, second = self.attention(q, k, v, batch), self.other_attention(q, k, v, batch)
        return self.up(first.flatten(1)) + self.up(second.flatten(1))

    model = custom(body)
    model.up = Linear(WIDTH, WIDTH)
    fill(model.up)
    hidden = run_prompt(planned(model, weight_format), TOKENS)
    wanted = expected(model, TOKENS)  # type: ignore[arg-type]
    assert (hidden - wanted).abs().max() <= 0.05 * wanted.abs().max()


def not_written(self: Any, x: Any, batch: Any) -> Any:
    q, _, _ = self.heads(x)
    return paged_attention(q, batch.kv_caches[0], batch, 0, 1.0, None).flatten(1)


def wrong_group(self: Any, x: Any, batch: Any) -> Any:
    q, k, v = self.heads(x)
    write_kv(k, v, batch.kv_caches[0], batch.slot_mapping[0])
    return paged_attention(q, batch.kv_caches[0], batch, 1, 1.0, None).flatten(1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (body_of_heads(lambda s, q, k, v, r, x: (rope(q, *r[::-1]), rope(k, *r[::-1]), v)), "other angles"),
        (not_written, "a cache not written"),
        (wrong_group, "another cache"),
        (lambda self, x, batch: self.attention(*self.heads(x), batch).flatten(1) + self.attention(
            *self.heads(x), batch).flatten(1), "a second write"),
        (lambda self, x, batch: nn.functional.embedding(self.rotary(batch.positions)[0], self.table), "embedding of"),
        (lambda self, x, batch: x + self.rotary(batch.positions)[0].view(-1, 16), "sum of other"),
        (lambda self, x, batch: x * self.rotary(batch.positions)[0].view(-1, 16), "product of other"),
    ],
)  # fmt: skip
def test_what_has_no_instruction_is_refused(body: Any, words: str) -> None:
    with pytest.raises(NotTraceableError, match=words):
        program_of(custom(body))


@pytest.mark.parametrize(
    ("compute_logits", "has_likeliest"),
    [
        (lambda self, hidden: relu(self.head(hidden)), False),
        (lambda self, hidden: soft_cap(self.head(hidden) / 0.1, 3.0), False),
        (lambda self, hidden: soft_cap(soft_cap(self.head(hidden), 3.0), 2.0), False),
        (lambda self, hidden: self.head(hidden) * 2.0, False),
        (lambda self, hidden: self.head(gelu(hidden)), True),
        (lambda self, hidden: self.head(self.norm(hidden)), True),
        (lambda self, hidden: self.head(hidden / 0.3), True),
        (lambda self, hidden: soft_cap(self.head(hidden), 0.5), True),
        (lambda self, hidden: soft_cap(self.head(hidden), 1e-3), True),
    ],
)
def test_head_of_several_operations_gives_its_logits(compute_logits: Any, has_likeliest: bool) -> None:
    """The likeliest token needs no logits; where a cap makes several equal, it is the first."""
    model = custom(lambda self, x, batch: x, compute_logits=compute_logits)
    model.norm = RMSNorm(WIDTH, 1e-5)
    fill(model.norm)
    plan = planned(model)
    assert (plan.gives_likeliest) == has_likeliest
    hidden = run_prompt(plan, TOKENS)
    found = logits_of(plan, [3, 16, 3])
    torch.testing.assert_close(found, model.compute_logits(hidden[[3, 16, 3]]))
    if has_likeliest:
        best = np.argmax(found.numpy(), -1).tolist()
        logits_of(plan, [3, 16, 3], part=GREEDY)
        assert plan.best_ids[:3].tolist() == best


def test_caps_and_multiples_are_written_over_what_nothing_else_reads() -> None:
    """Capped logits take no second matrix of the vocabulary's width."""
    program = program_of(
        custom(
            lambda self, x, batch: x * 2.0 + (x * 3.0) * 4.0,
            compute_logits=lambda self, hidden: soft_cap(self.head(hidden), 3.0),
        )
    )
    cap = program.head[-1]
    assert isinstance(cap, SoftCap)
    assert cap.x.buffer is cap.out is program.logits
    twice, thrice, again = (item for item in program.body if isinstance(item, Scale))
    assert twice.out is not twice.x.buffer
    assert thrice.out is not thrice.x.buffer
    assert again.out is again.x.buffer


def test_head_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(NotTraceableError, match="a head without a linear layer"):
        program_of(custom(lambda self, x, batch: x, compute_logits=lambda self, hidden: hidden))


def test_formats_of_each_weight_decide_alone() -> None:
    """A product in fp32 and one in 4 bit get rows of different types."""
    model = graph(("rms_norm", 0), ("linear", 1), ("linear", 1), ("add", 2, 3))
    formats = {id(model.weight_1): Format.bf16, id(model.weight_2): Format.q4m}

    def packing_of(parameter: torch.Tensor) -> Packing:
        return Packing.whole(len(parameter), formats.get(id(parameter), Format.f32))

    program = lower(trace_model(model, (0,)), packing_of)
    types = {item.weight: item.x.buffer.type for item in program.body if isinstance(item, Gemm)}
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
    """Random graphs give the values of op-by-op execution; a value read too late would be wrong by its own size."""

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
            parameter.data = decoded(weights, parameter)
