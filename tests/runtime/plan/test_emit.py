"""Buffers at addresses: what is alive at one time never shares memory. And steps of a plan, to its limits."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire._native import RowType
from quire.kernels.elementwise import Add
from quire.kernels.instruction import Buffer, Columns, Convert, Instruction, Packing
from quire.kernels.linear import Gemm
from quire.kernels.paged_attention import Attend
from quire.runtime.plan.emit import BODY, GREEDY, LOGITS, place_buffers, plan_ahead
from tests.kernels.native.packed_weights import ISAS, each_isa
from tests.runtime.plan.graphs import Format, GraphModel, Op, logits_of, planned, run_prompt

TOKENS = [7, 1, 18, 4, 4, 0, 11, 3, 9]
MODEL = [Op("rms_norm", (0,)), Op("attention", (1,)), Op("linear", (2,)), Op("add", (0, 3)), Op("gated", (4,))]


def whole(buffer: Buffer) -> Columns:
    return Columns(buffer, 0, buffer.width)


def convert(x: Buffer, out: Buffer) -> Convert:
    return Convert(whole(x), out)


def add(a: Buffer, b: Buffer, out: Buffer) -> Add:
    return Add(whole(a), whole(b), out)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Instruction], Buffer]:
    """Sums and conversions of buffers of any size made before, some of them never read; the result may be any."""
    buffers = [Buffer(draw(st.integers(1, 100)), draw(st.sampled_from(list(RowType))))]
    body: list[Instruction] = [convert(buffers[0], buffers[0])]
    for _ in range(draw(st.integers(0, 20))):
        made = Buffer(draw(st.integers(1, 100)), draw(st.sampled_from(list(RowType))))
        first, second = (draw(st.sampled_from(buffers)) for _ in range(2))
        # In place as a fused sum is, or into new memory.
        body.append(draw(st.sampled_from([add(first, second, made), convert(first, made), add(first, second, first)])))
        if made in body[-1].buffers:
            buffers.append(made)
    return body, draw(st.sampled_from(buffers))


@given(programs())
def test_places_are_large_enough_and_belong_to_one_living_buffer(program: tuple[list[Instruction], Buffer]) -> None:
    body, result = program
    placement = place_buffers(body, result)
    lives: dict[int, list[tuple[int, int]]] = {}
    for buffer, place in placement.places.items():
        assert placement.row_bytes[place] >= buffer.row_bytes
        uses = [index for index, instruction in enumerate(body) if buffer in instruction.buffers]
        last = len(body) if buffer is result else uses[-1]
        lives.setdefault(place, []).append((uses[0], last))
    for spans in lives.values():
        ordered = sorted(spans)
        # Also within one instruction: what it reads and what it writes are apart.
        assert all(last < first for (_, last), (first, _) in itertools.pairwise(ordered))
    assert set(placement.places) == {buffer for instruction in body for buffer in instruction.buffers}


def test_products_share_what_the_next_attention_reads() -> None:
    wide, narrow = Buffer(64), Buffer(32)
    gemms = [
        Gemm(torch.zeros(n, 32), None, Packing.whole(n, Format.f32), whole(narrow), wide) for n in (64, 16, 48, 32)
    ]
    attends = [Attend(whole(wide), narrow, 1, 1.0, 7 * layer, layer, 1, 0.0) for layer in range(2)]
    body = [gemms[0], attends[0], gemms[1], convert(wide, narrow), gemms[2], attends[1], gemms[3]]
    assert plan_ahead(body) == {
        gemms[0]: (0, 0, 0.0, 1.0),
        gemms[1]: (1, 7, 0.0, 0.25),
        gemms[2]: (1, 7, 0.25, 1.0),
    }


def test_chain_needs_two_places() -> None:
    buffers = [Buffer(64) for _ in range(30)]
    body = [convert(a, b) for a, b in itertools.pairwise(buffers)]
    assert len(place_buffers(body, buffers[-1]).row_bytes) == 2


def test_body_and_head_in_one_call() -> None:
    plan = planned(GraphModel(MODEL))
    hidden = run_prompt(plan, TOKENS)
    wanted = logits_of(plan, [8])
    plan.hidden.fill(0)
    one, count = np.zeros(1, np.int32), np.array([9], np.int32)
    tables = np.arange(1, 8, dtype=np.int32).reshape(1, 1, -1)
    rows = np.array([8], np.int32)
    plan.run(BODY | LOGITS | GREEDY, one, one, count, rows, np.array([TOKENS], np.int32), tables)
    assert np.array_equal(plan.hidden[:9], hidden)
    assert np.array_equal(plan.logits[:1], wanted)
    assert plan.best_ids[0] == wanted.argmax()


@pytest.mark.parametrize("weight_format", [Format.f32, Format.f16, Format.bf16, Format.q8, Format.q4m])
def test_threads_and_instruction_sets_give_the_same_bits(weight_format: object) -> None:
    def compute() -> list[torch.Tensor]:
        plans = [planned(GraphModel(MODEL), weight_format, num_threads=num_threads) for num_threads in (1, 2, 3)]
        return [run_prompt(plan, TOKENS) for plan in plans]

    # AMX sums bf16 products in an order of its own.
    apart = [isa for isa in ISAS if "amx" in isa and weight_format == Format.bf16]
    for isas in (apart, [isa for isa in ISAS if isa not in apart]):
        found = [result for results in each_isa(compute, isas) for result in results]
        assert not any(result.isnan().any() for result in found)
        assert all(torch.equal(found[0], result) for result in found)


def test_step_may_be_as_large_as_the_limits_and_no_larger() -> None:
    model = GraphModel(MODEL)
    small, large = planned(model, max_tokens=9), planned(model, max_tokens=32)
    assert torch.equal(run_prompt(small, TOKENS), run_prompt(large, TOKENS))
    with pytest.raises(ValueError, match="10 tokens"):
        run_prompt(small, [*TOKENS, 1])
    with pytest.raises(ValueError, match="9 rows of logits"):
        logits_of(small, range(9))
    assert torch.equal(run_prompt(small, TOKENS), run_prompt(large, TOKENS))


def test_step_of_no_numbers_leaves_nothing_behind() -> None:
    """NaN stays in buffers and scratch memory, and in the cache; the next step must not read it there."""
    model = GraphModel(MODEL)
    model.table[5] = torch.nan
    for weight_format in (Format.f32, Format.bf16, Format.q8):
        plan = planned(model, weight_format)
        assert run_prompt(plan, [5] * 32).isnan().all()
        assert torch.equal(run_prompt(plan, [7, 1]), run_prompt(planned(model, weight_format), [7, 1]))
