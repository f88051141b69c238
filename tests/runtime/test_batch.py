"""`build_batch` against one written token by token, on random steps."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache_spec import CacheGroup, PagedKV
from quire.layers.forward_batch import ForwardBatch
from quire.runtime.batch import RequestStates, StepLayout, build_batch, lay_out
from quire.runtime.cache_engine import CacheEngine
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.types import BlockTableUpdate, NewRequest, ScheduledRequest, SchedulerOutput
from tests.runtime.builders import make_config

GROUPS = (
    CacheGroup((0,), PagedKV(num_kv_heads=1, head_size=2, dtype_bytes=4)),
    CacheGroup((1,), PagedKV(num_kv_heads=1, head_size=2, dtype_bytes=4)),
)


@dataclass
class Case:
    """A request of a step: known tokens, tokens computed before, tokens to compute, blocks per group."""

    tokens: list[int]
    start: int
    count: int
    samples: bool
    num_siblings: int
    tables: list[list[int]] = field(default_factory=list)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.one_of(st.just(1), st.integers(1, 12)))
    start = draw(st.integers(0, 20))
    known = start + count + draw(st.integers(0, 5))
    samples = draw(st.booleans())
    tokens = draw(st.lists(st.integers(0, 999), min_size=known, max_size=known))
    return Case(tokens, start, count, samples, draw(st.integers(0, 2)) if samples else 0)


def build(step_cases: list[Case], block_size: int) -> tuple[StepLayout, ForwardBatch, SchedulerOutput]:
    config = make_config(kv_cache_groups=GROUPS, block_size=block_size, num_blocks=8, max_model_len=64)
    states = RequestStates(max_num_seqs=4, max_model_len=64, block_size=block_size, num_groups=2)
    block_ids = iter(np.random.default_rng(0).permutation(4000).tolist())
    news, items = [], []
    for number, case in enumerate(step_cases):
        length = -(-(case.start + case.count) // block_size)
        case.tables = [[next(block_ids) for _ in range(length)] for _ in GROUPS]
        updates = tuple(BlockTableUpdate(0, tuple(table)) for table in case.tables)
        for sibling in range(1 + case.num_siblings):
            name, leader = f"{number}.{sibling}", f"{number}.0" if sibling else None
            news.append(NewRequest(name, tuple(case.tokens), len(case.tokens), SamplingParams(), None, (), 0))
            num_tokens = 0 if sibling else case.count
            items.append(ScheduledRequest(name, case.start, num_tokens, int(case.samples), (), updates, leader))
    output = SchedulerOutput(0, tuple(news), tuple(items), (), (), ())
    scheduled = states.apply(output)
    for state in scheduled:
        state.sampling = SamplingState(state.new, SamplingParams(), 1000)
    layout = lay_out(output, scheduled)
    return layout, build_batch(layout, states, CacheEngine(config), block_size, torch.device("cpu")), output


@settings(deadline=None, max_examples=60)
@given(st.lists(cases(), min_size=1, max_size=6), st.sampled_from([1, 3, 4, 16]))
def test_equals_a_batch_made_token_by_token(step_cases: list[Case], block_size: int) -> None:
    step, batch, output = build(step_cases, block_size)
    ordered = [case for case in step_cases if case.count == 1] + [case for case in step_cases if case.count > 1]
    token_ids, positions, slots, first_rows = [], [], [[], []], [0]  # type: ignore[var-annotated]
    for case in ordered:
        for position in range(case.start, case.start + case.count):
            token_ids.append(case.tokens[position])
            positions.append(position)
            for group in range(2):
                block_id = case.tables[group][position // block_size]
                slots[group].append(block_id * block_size + position % block_size)
        first_rows.append(len(token_ids))
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert [slot.tolist() for slot in batch.slot_mapping] == slots
    assert batch.seq_lens_list == tuple(case.start + case.count for case in ordered)
    assert batch.query_lens_list == tuple(case.count for case in ordered)
    longest = max(len(case.tables[0]) for case in step_cases)
    for group, table in enumerate(batch.block_tables):
        assert table.shape == (len(ordered), longest)
        for row, case in enumerate(ordered):
            assert table[row, : len(case.tables[group])].tolist() == case.tables[group]

    # Each sampling request, siblings too, gets the logits of its last token.
    sampled_ids = [item.request_id for item, _, _ in step.sampled]
    assert sampled_ids == [item.request_id for item in output.scheduled if item.max_new_tokens]
    index = step.logit_index if step.logit_index is not None else range(len(sampled_ids))
    for request_id, chosen in zip(sampled_ids, index, strict=True):
        case = step_cases[int(request_id.split(".")[0])]
        row = int(step.logit_rows[chosen])
        at = next(i for i, other in enumerate(ordered) if other is case)
        assert row == first_rows[at + 1] - 1
    assert len(step.logit_rows) == sum(case.samples for case in step_cases)
    assert [item.request_id for item, _ in step.computed] == [f"{step_cases.index(case)}.0" for case in ordered]
    assert step.first_rows == first_rows[:-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda() -> None:
    config = make_config(kv_cache_groups=GROUPS, device="cuda:0")
    states = RequestStates(max_num_seqs=4, max_model_len=64, block_size=4, num_groups=2)
    update = BlockTableUpdate(0, (3,))
    new = NewRequest("a", (7, 8), 2, SamplingParams(), None, (), 0)
    output = SchedulerOutput(0, (new,), (ScheduledRequest("a", 0, 2, 0, (), (update, update)),), (), (), ())
    batch = build_batch(lay_out(output, states.apply(output)), states, CacheEngine(config), 4, torch.device("cuda:0"))
    for tensor in (batch.token_ids, batch.block_tables[0], batch.slot_mapping[1]):
        assert tensor.is_cuda
    assert batch.slot_mapping[0].tolist() == [12, 13]
