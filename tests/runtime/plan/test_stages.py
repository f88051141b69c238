"""Programs cut into stages: every instruction once, balanced, with the residual stream between them."""

import itertools
from typing import Any

import pytest

from quire.errors import UnsupportedModelError
from quire.kernels.rope import Rotary
from quire.runtime.plan.load import load_plan, trace_program
from quire.runtime.plan.stages import ONE_TOKEN, Receive, choose_cuts, cut, possible_cuts
from tests.models.tiny_configs import LLAMA, full_config
from tests.runtime.plan.harness import make_checkpoint, make_config

NUM_LAYERS = 6


def traced(vocab_size: int = 53, **options: Any) -> Any:
    """Program and weights of a Llama of six layers, or of a stage of it."""
    hf_config = full_config("llama", {**LLAMA, "num_hidden_layers": NUM_LAYERS, "vocab_size": vocab_size})
    stage = options.pop("stage", 0)
    config = make_config(hf_config, load_format="dummy", **options)
    return trace_program(config, make_checkpoint(hf_config, {}), (0,) * NUM_LAYERS, stage=stage)


@pytest.mark.parametrize("num_stages", [2, 3, 6])
def test_each_instruction_is_in_one_stage_and_angles_are_in_each(num_stages: int) -> None:
    program, _, _ = traced()
    stages = [cut(program, stage, num_stages) for stage in range(num_stages)]
    parts = [[item for item in each.body if not isinstance(item, Receive | Rotary)] for each in stages]
    assert [item for part in parts for item in part] == [item for item in program.body if not isinstance(item, Rotary)]
    assert [layer for each in stages for layer in each.layers or ()] == list(range(NUM_LAYERS))
    for before, after in itertools.pairwise(stages):
        assert before.outputs == after.inputs
        assert [buffer.width for buffer in after.inputs] == [LLAMA["hidden_size"]]
        assert not before.head
        assert any(isinstance(item, Rotary) for item in after.body)
    assert (stages[-1].head, stages[-1].hidden) == (program.head, program.hidden)


@pytest.mark.parametrize("vocab_size", [53, 800, 2000])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_no_other_cuts_make_the_costliest_stage_cheaper(vocab_size: int, num_stages: int) -> None:
    program, _, _ = traced(vocab_size)

    def costliest(cuts: tuple[int, ...]) -> int:
        costs = [item.cost(ONE_TOKEN).bytes_read for item in program.body]
        ends = [0, *cuts, len(costs)]
        stages = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
        stages[-1] += sum(item.cost(ONE_TOKEN).bytes_read for item in program.head)
        return max(stages)

    best = min(costliest(cuts) for cuts in itertools.combinations(possible_cuts(program.body), num_stages - 1))
    assert costliest(tuple(choose_cuts(program, num_stages))) == best


def test_stages_hold_the_weights_of_their_layers() -> None:
    """A large head makes the last stage the one with fewer layers."""
    _, whole, _ = traced(2000)
    stages = [traced(2000, pipeline_parallel_size=2, stage=stage) for stage in (0, 1)]
    names = [set(weights.shapes) for _, weights, _ in stages]
    assert names[0] | names[1] == set(whole.shapes)
    assert not names[0] & names[1]
    assert ("embed_tokens.weight" in names[0], "lm_head.weight" in names[1]) == (True, True)
    first, last = (program.layers for program, _, _ in stages)
    assert len(first) > len(last)
    assert sum(weights.num_bytes for _, weights, _ in stages) <= whole.num_bytes + 64 * 2


def test_values_of_another_stage_are_not_made() -> None:
    hf_config = full_config("llama", {**LLAMA, "tie_word_embeddings": True})
    config = make_config(hf_config, load_format="dummy", pipeline_parallel_size=2)
    shapes = [load_plan(config, make_checkpoint(hf_config, {}), (0, 0), stage=stage)[1].shapes for stage in (0, 1)]
    assert set(shapes[0]) & set(shapes[1]) == {"embed_tokens.weight"}


def test_more_stages_than_places_to_cut_name_the_number_that_fits() -> None:
    program, _, _ = traced()
    with pytest.raises(UnsupportedModelError, match="--pipeline-parallel-size 6 fits"):
        cut(program, 0, 7)
