"""Both ways to run a model behind one protocol: the same requests, tables and rows give the same hidden states."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.runtime.batch import RequestStates, StepLayout, lay_out
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.eager import load_model
from quire.runtime.forward import EagerForward, Forward, PlannedForward
from quire.runtime.plan.emit import PlanLimits, PlannedModel
from quire.runtime.plan.load import load_plan
from quire.runtime.worker import Worker, kv_layers
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.types import BlockTableUpdate, NewRequest, ScheduledRequest, SchedulerOutput
from tests.runtime.tiny_llama import tiny_llama

BLOCK_SIZE, MAX_LOGIT_ROWS = 16, 4
CACHES: list[CacheEngine] = []
LENGTHS = {"a": 37, "b": 1, "c": 20, "d": 6}


def tokens_of(name: str) -> list[int]:
    return [(7 * i * i + 3 * i + 11 * ord(name)) % 97 for i in range(LENGTHS[name])]


class Requests:
    """Requests with known tokens only; steps of any of them."""

    def __init__(self) -> None:
        self.states = RequestStates(max_num_seqs=2, max_model_len=128, block_size=BLOCK_SIZE, num_groups=1)
        self._first_blocks = {name: 1 + 8 * index for index, name in enumerate(LENGTHS)}
        self._known: set[str] = set()

    def step(self, *work: tuple[str, int, int, bool]) -> StepLayout:
        """Return a step of parts (request, first position, number of tokens, samples)."""
        new, items = [], []
        for name, start, count, samples in work:
            first = self._first_blocks[name]
            update = BlockTableUpdate(0, tuple(range(first, first + -(-LENGTHS[name] // BLOCK_SIZE))))
            if name not in self._known:
                self._known.add(name)
                new.append(NewRequest(name, tuple(tokens_of(name)), LENGTHS[name], SamplingParams(), None, (), 0))
            items.append(ScheduledRequest(name, start, count, int(samples), (), (update,)))
        output = SchedulerOutput(0, tuple(new), tuple(items), (), (), ())
        states = self.states.apply(output)
        for state in states:
            state.sampling = SamplingState(state.new, SamplingParams(), 97)
        return lay_out(output, states)


def make(kind: str, num_threads: int = 1) -> Forward:
    config, checkpoint = tiny_llama(block_size=BLOCK_SIZE)
    cache = CacheEngine(config)
    cache.pool.fill_(float("nan"))
    if kind == "eager":
        return EagerForward(load_model(config, checkpoint), cache, BLOCK_SIZE, torch.device("cpu"))
    CACHES.append(cache)  # a plan has its addresses only
    program, weights = load_plan(config, checkpoint, cache.layer_groups)
    limits = PlanLimits(max_tokens=64, max_requests=16, max_logit_rows=MAX_LOGIT_ROWS)
    return PlannedForward(
        PlannedModel(program, weights, kv_layers(config, cache), limits, num_threads),
    )


@pytest.fixture(scope="module")
def whole() -> dict[str, NDArray[np.float32]]:
    """Logits of each request's positions, run alone and op by op."""
    found = {}
    for name, length in LENGTHS.items():
        forward, requests = make("eager"), Requests()
        forward.run(requests.step((name, 0, length, True)), requests.states, only_likeliest=False)
        found[name] = forward.logits(np.arange(length, dtype=np.int32))
    return found


STEPS: list[list[tuple[str, int, int, bool]]] = [
    [("a", 0, 36, False)],
    [("c", 0, 20, True), ("b", 0, 1, True), ("a", 36, 1, True)],
    [("d", 0, 3, False)],
    [("d", 3, 3, True)],
]


def rows_of(layout: StepLayout) -> list[tuple[str, int]]:
    """Per row of the step its request and position."""
    return [
        (item.request_id, item.num_computed_tokens + i) for item, _ in layout.computed for i in range(item.num_tokens)
    ]


@pytest.mark.parametrize("kind", ["eager", "planned"])
def test_logits_of_any_rows_after_any_step(kind: str, whole: dict[str, NDArray[np.float32]]) -> None:
    forward, requests = make(kind), Requests()
    for work in STEPS:
        layout = requests.step(*work)
        assert forward.run(layout, requests.states, only_likeliest=False) is None
        rows = rows_of(layout)
        # More rows than a plan computes logits of at once, in any order and twice.
        order = [*range(len(rows)), 0, *range(len(rows) - 1, -1, -1)]
        found = forward.logits(np.array(order, np.int32))
        expected = np.stack([whole[name][position] for name, position in (rows[index] for index in order)])
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert forward.hidden(0, len(rows)).shape == (len(rows), 48)
        assert forward.hidden(1, 1).shape == (0, 48)
        assert forward.logits(np.zeros(0, np.int32)).shape == (0, 97)


def test_hidden_states_are_those_of_the_rows() -> None:
    eager, planned = make("eager"), make("planned")
    for forward in (eager, planned):
        requests = Requests()
        forward.run(requests.step(("c", 0, 20, False), ("b", 0, 1, True)), requests.states, only_likeliest=False)
    np.testing.assert_allclose(planned.hidden(3, 9), eager.hidden(3, 9), rtol=1e-4, atol=1e-4)


def test_plan_gives_the_likeliest_tokens_at_once(whole: dict[str, NDArray[np.float32]]) -> None:
    forward, requests = make("planned"), Requests()
    forward.run(requests.step(*STEPS[0]), requests.states, only_likeliest=True)
    layout = requests.step(*STEPS[1])
    found = forward.run(layout, requests.states, only_likeliest=True)
    rows = rows_of(layout)
    wanted = [rows[row] for row in layout.logit_rows]
    assert found == [int(whole[name][position].argmax()) for name, position in wanted]
    # Logits can be asked for all the same.
    expected = np.stack([whole[name][position] for name, position in wanted])
    np.testing.assert_allclose(forward.logits(layout.logit_rows), expected, rtol=1e-4, atol=1e-4)


def test_where_nothing_or_too_much_is_wanted_there_are_no_likeliest_tokens() -> None:
    forward, requests = make("planned"), Requests()
    assert forward.run(requests.step(("c", 0, 20, False)), requests.states, only_likeliest=True) is None
    many = Requests()
    many._first_blocks = {str(index): 1 + index for index in range(MAX_LOGIT_ROWS + 1)}
    LENGTHS.update(dict.fromkeys(many._first_blocks, 2))
    try:
        layout = many.step(*((name, 0, 2, True) for name in many._first_blocks))
    finally:
        for name in many._first_blocks:
            del LENGTHS[name]
    assert forward.run(layout, many.states, only_likeliest=True) is None
    assert forward.logits(layout.logit_rows).shape == (MAX_LOGIT_ROWS + 1, 97)


def test_no_likeliest_token_where_logits_are_no_numbers() -> None:
    forward, requests = make("planned"), Requests()
    good = forward.run(requests.step(("d", 0, 6, True)), requests.states, only_likeliest=True)
    planned: Any = forward
    # The same step with a cache in which the first block of request c holds NaN.
    layout = requests.step(("c", 5, 15, True), ("d", 5, 1, True))
    found = planned.run(layout, requests.states, only_likeliest=True)
    assert [item.request_id for item, _ in layout.computed] == ["d", "c"]
    assert dict(zip([item.request_id for item, _, _ in layout.sampled], found, strict=True)) == {
        "d": good[0],
        "c": None,
    }


def test_tables_may_grow_between_steps(whole: dict[str, NDArray[np.float32]]) -> None:
    """`RequestStates` makes new arrays when it needs more rows; the plan must read those."""
    forward, requests = make("planned"), Requests()
    forward.run(requests.step(("a", 0, 36, False)), requests.states, only_likeliest=False)
    before = requests.states.tokens
    layout = requests.step(("b", 0, 1, False), ("c", 0, 20, False), ("d", 0, 6, False), ("a", 36, 1, True))
    assert requests.states.tokens is not before
    forward.run(layout, requests.states, only_likeliest=False)
    found = forward.logits(layout.logit_rows)
    np.testing.assert_allclose(found, whole["a"][36:37], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"block_size": 16}, PlannedForward),
        ({"block_size": 16, "enforce_eager": True}, EagerForward),
        ({"block_size": 8}, EagerForward),
    ],
)
def test_worker_takes_the_one_that_was_decided(options: dict[str, Any], kind: type) -> None:
    config, checkpoint = tiny_llama(**options)
    assert isinstance(Worker(config, checkpoint).forward, kind)
