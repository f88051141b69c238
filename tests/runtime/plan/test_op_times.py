"""Times and costs of the plan that runs: every instruction in order, the same bits, and totals of a whole model."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from quire._native import KvFormat, WeightFormat
from quire.engine.llm_engine import LLMEngine
from quire.events import EventKind
from quire.kernels.instruction import Packing, StepShape
from quire.kernels.linear import Gemm
from quire.nn import named_parameters
from quire.runtime.loader import make_model
from quire.runtime.plan.emit import BODY, GREEDY, LOGITS
from quire.runtime.plan.lower import lower
from quire.runtime.plan.packed_weights import PackedWeights
from quire.runtime.plan.trace import trace_model
from quire.sampling_params import SamplingParams
from tests.cli.tiny_directory import make_tiny_directory
from tests.engine.builders import run
from tests.models.tiny_configs import TINY_CONFIGS, full_config
from tests.runtime.plan.graphs import GraphModel, Op, planned

MODEL = [Op("rms_norm", (0,)), Op("attention", (1,)), Op("linear", (2,)), Op("add", (0, 3)), Op("gated", (4,))]
TOKENS = np.array([[7, 1, 18, 4, 4, 0, 11, 3, 9]], np.int32)


def step_of(parts: int) -> tuple[Any, ...]:
    zero, tables = np.zeros(1, np.int32), np.arange(1, 8, dtype=np.int32).reshape(1, 1, -1)
    return parts, zero, zero, np.array([9], np.int32), np.array([8, 2], np.int32), TOKENS, tables


@pytest.mark.parametrize("head", [LOGITS, GREEDY])
def test_timed_run_names_every_instruction_in_order_and_leaves_the_bits(head: int) -> None:
    plain, timed = planned(GraphModel(MODEL)), planned(GraphModel(MODEL))
    plain.run(*step_of(BODY | head))
    times = timed.run_timed(*step_of(BODY | head))
    expected = [type(item).__name__ for item in timed.program.body]
    expected += ["Convert", "Gemm"] if head == LOGITS else ["Convert", "Likeliest", "Argmax"]
    assert [op.name.split(":")[0] for op in times] == expected
    assert all(op.microseconds > 0 for op in times)
    assert np.array_equal(plain.hidden[:9], timed.hidden[:9])
    assert np.array_equal(plain.logits[:2], timed.logits[:2]) or head == GREEDY
    assert plain.best_ids.tolist() == timed.best_ids.tolist()
    gemm = times[expected.index("Gemm")]
    assert gemm.name == "Gemm: x [9, 32] f32, out [9, 64] f32, weight [64, 32] f32"
    assert (gemm.flops, gemm.arithmetic, gemm.num_bytes) == (2 * 9 * 64 * 32, "fp32", 4 * 64 * 32 + 4 * 64)
    assert times[-1 if head == LOGITS else -2].flops == 2 * 2 * 19 * 32


@pytest.mark.parametrize("setting", ["", "1", "events"])
def test_traced_engine_runs_its_plan_and_records_its_instructions(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    directory = make_tiny_directory(tmp_path, tie_word_embeddings=False)
    found = []
    for value in ("", setting):
        monkeypatch.setenv("QUIRE_TRACE", value)
        engine = LLMEngine.from_options(
            str(directory), load_format="dummy", dtype="float32", num_blocks_override=16, device="cpu"
        )
        engine.add_request("a", {"prompt_token_ids": [5, 9, 2]}, SamplingParams(temperature=0, max_tokens=4))
        with caplog.at_level(logging.INFO, logger="quire.kernels"):
            found.append(run(engine)[-1].outputs[0].token_ids)
    assert found[0] == found[1]
    events = engine.events.of(EventKind.OPS)
    assert len(events) == (engine.events.of(EventKind.STEP).__len__() if setting else 0)
    if setting:
        names = [op.name.split(":")[0] for op in events[0].data["ops"]]
        assert names[:2] == ["Embed", "Rotary"]
        assert "Attend" in names
        assert all(op.microseconds > 0 for op in events[0].data["ops"])
    assert any("Gemm: x [3, 16] f32" in record.getMessage() for record in caplog.records) == (setting == "1")


def test_models_instructions_read_its_weights_and_its_cache_once() -> None:
    """SmolLM2's sizes: 30 layers of width 576 with 9 query heads and 3 KV heads of 64, MLP 1536, 49,152 tokens."""
    fields = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    with torch.device("meta"):
        model = make_model(fields)
    parameters = dict(named_parameters(model))
    weights = PackedWeights(
        parameters, {name: Packing.whole(len(each), WeightFormat.bf16) for name, each in parameters.items()}
    )
    program = lower(trace_model(model, (0,) * 30), weights.packing_of)
    step = StepShape(((480, 1), (100, 3)), num_logit_rows=2, kv_format=KvFormat.f16)
    body = [instruction.cost(step) for instruction in program.body]
    head = [instruction.cost(step.of_logit_rows()) for instruction in program.head]
    num_positions, kv_bytes = 481 + 103, 30 * 2 * 3 * 64 * 2
    num_read = sum(cost.bytes_read for cost in (*body, *head))
    assert num_read == weights.num_bytes + 4 * 576 * 2 + num_positions * kv_bytes
    assert sum(cost.bytes_written for cost in (*body, *head)) == 4 * kv_bytes
    products = [cost for item, cost in zip(program.body, body, strict=True) if isinstance(item, Gemm)]
    assert {cost.arithmetic for cost in products} == {"bf16"}
    assert products[0].flops == 2 * 4 * 576 * (9 + 2 * 3) * 64  # 2 · T · E · (H + 2K) · D
    in_layers = 30 * 576 * ((9 + 6) * 64 + 9 * 64 + 3 * 1536)
    assert sum(cost.flops for cost in products) == 2 * 4 * in_layers
    assert head[-1].flops == 2 * 2 * 576 * 49152
    attends = [cost for cost in body if cost.flops == 4 * 576 * (481 + 101 + 102 + 103)]
    assert len(attends) == 30
    assert len({instruction.cost_key for instruction in program.body}) < len(program.body) / 10


@pytest.mark.parametrize(("model_type", "fields"), [
    (model_type, fields) for model_type, found in sorted(TINY_CONFIGS.items()) for fields in found.values()
])  # fmt: skip
def test_instructions_with_equal_keys_cost_the_same(model_type: str, fields: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = make_model(full_config(model_type, fields))
    parameters = dict(named_parameters(model))
    packings = {name: Packing.whole(len(each), WeightFormat.bf16) for name, each in parameters.items()}
    traced = trace_model(model, (0,) * model.config.num_layers)
    body = lower(traced, PackedWeights(parameters, packings).packing_of).body
    for step in (StepShape(((3, 1), (90, 7)), 2), StepShape(((0, 70),), 1, KvFormat.i8)):
        found: dict[Any, set[Any]] = {}
        for instruction in body:
            found.setdefault(instruction.cost_key, set()).add(instruction.cost(step))
        assert [key for key, costs in found.items() if len(costs) > 1] == []
