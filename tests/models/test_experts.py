"""Mixtures of experts beyond logits: errors, stored forms, quantised weights, and the experts that a step reads."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.engine.llm_engine import LLMEngine
from quire.errors import ModelFileError, UnsupportedModelError
from quire.events import EventKind, OpTime
from quire.kernels.experts import ExpertGemm, Route
from quire.kernels.instruction import StepShape
from quire.layers.group import LocalGroup
from quire.models.registry import ModelRegistry
from quire.runtime.eager import load_model
from quire.runtime.loader import plan_share, weigh
from quire.runtime.plan.emit import BODY
from quire.runtime.plan.packed_weights import kept_bytes
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.sources import ModelFiles
from tests.cli.tiny_directory import make_tiny_directory
from tests.engine.builders import run
from tests.models.harness import build_model, random_tokens, stored
from tests.models.oracle import Pair, make_oracle
from tests.models.test_conformance import assert_close
from tests.models.tiny_configs import LLAMA, QWEN3_MOE, TINY_CONFIGS, full_config
from tests.runtime.plan.harness import NO_ROWS, PlanRunner, make_checkpoint, make_config

WIDE = {**QWEN3_MOE, "hidden_size": 64, "moe_intermediate_size": 64, "norm_topk_prob": True}
"""Whole tiles, and blocks of 32 columns in whole cache lines."""


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair("qwen3_moe", WIDE)


# --- Configurations and files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9, more than num_experts=8: set .* at most 8"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok=0, which is not an integer from 1"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "lacks num_experts_per_tok, which a qwen3_moe model needs"),
        ("qwen3_moe", {"num_experts": 4097}, "num_experts=4097, which is not an integer from 1 to 4096"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts=8 and num_local_experts=4, two names of one number"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers=.*not a list of layers from 0 to 1"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ("mixtral", {"num_experts_per_tok": 5}, "more than num_local_experts=4"),
    ],
)
def test_wrong_numbers_of_experts_name_the_field(model_type: str, changes: dict[str, Any], message: str) -> None:
    fields = WIDE if model_type == "qwen3_moe" else TINY_CONFIGS[model_type]["two of four"]
    hf_config = full_config(model_type, {**fields, **changes})
    with pytest.raises(ModelFileError, match=message):
        ModelRegistry.resolve(hf_config).Config.from_hf(hf_config)


@pytest.mark.parametrize(("model_type", "field", "value"), [
    ("olmoe", "clip_qkv", 8.0), ("qwen3_moe", "shared_expert_intermediate_size", 64), ("mixtral", "n_group", 2),
])  # fmt: skip
def test_fields_that_change_the_mathematics_are_refused(model_type: str, field: str, value: Any) -> None:
    hf_config = full_config(model_type, {**next(iter(TINY_CONFIGS[model_type].values())), field: value})
    with pytest.raises(UnsupportedModelError, match=field):
        ModelRegistry.resolve(hf_config).Config.from_hf(hf_config)


def test_missing_and_foreign_experts_are_named(pair: Pair) -> None:
    model = build_model(pair.hf_config, pair.oracle.state_dict())
    part = torch.zeros(64, 64)
    whole = {name: tensor for name, tensor in pair.checkpoint.tensors.items() if "layers.1.mlp.experts.g" not in name}
    experts = {
        name: stored(name, part)
        for index in range(8)
        for name in (f"model.layers.1.mlp.experts.{index}.{kind}_proj.weight" for kind in ("gate", "up"))
    }
    plan_share(model, whole | experts)
    lost = "model.layers.1.mlp.experts.5.up_proj.weight"
    with pytest.raises(
        ModelFileError, match=r"lacks tensor layers\.1\.mlp\.experts\.5\.up_proj\.weight: it is incompl"
    ):
        plan_share(model, whole | {name: tensor for name, tensor in experts.items() if name != lost})
    extra = "model.layers.1.mlp.experts.8.up_proj.weight"
    with pytest.raises(ModelFileError, match=r"unexpected tensor model\.layers\.1\.mlp\.experts\.8"):
        plan_share(model, whole | experts | {extra: stored(extra, part)})
    with pytest.raises(ModelFileError, match=r"experts\.gate_up_proj \[1024, 64\]"):
        plan_share(model, whole | experts | {lost: stored(lost, part[:20])})


@pytest.mark.parametrize("damage", ["cut off", "left out"])
def test_shard_of_experts_that_is_damaged_is_named(tmp_path: Path, damage: str) -> None:
    pair = Pair("qwen3_moe", WIDE)
    pair.oracle.save_pretrained(tmp_path, max_shard_size="150KB")
    shards = sorted(tmp_path.glob("model-0*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = next(path for path in shards[1:] if any("experts" in each for each, of in index.items() if of == path.name))
    stored_bytes = shard.read_bytes()
    if damage == "cut off":
        shard.write_bytes(stored_bytes[: 2 * len(stored_bytes) // 3])
    else:
        shard.unlink()
    with pytest.raises(ModelFileError, match=f"{re.escape(shard.name)}.*fetch"):
        open_checkpoint(ModelFiles("tiny", tmp_path, "hf", "test"))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe", "mixtral"])
def test_saved_directories_give_the_logits_of_transformers(tmp_path: Path, model_type: str, is_fused: bool) -> None:
    """Transformers saves a tensor per expert, or on request one for all of them."""
    pair = Pair(model_type, next(iter(TINY_CONFIGS[model_type].values())))
    pair.oracle.save_pretrained(tmp_path, save_original_format=not is_fused)
    checkpoint = open_saved(tmp_path)
    names = {name.rpartition("layers.0.")[2] for name in checkpoint.tensors}
    expert = "block_sparse_moe.experts.0.w1.weight" if model_type == "mixtral" else "mlp.experts.0.gate_proj.weight"
    assert ("mlp.experts.gate_up_proj" if is_fused else expert) in names
    runner, token_ids = PlanRunner(make_config(checkpoint.hf_config), checkpoint), random_tokens(9, 53)
    assert_close(runner.run(runner.add(token_ids)), pair.expected(token_ids))


def open_saved(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles(name="tiny", path=path, kind="hf", origin="test"))


COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
MIXTURES = [
    (model_type, name)
    for model_type, configs in TINY_CONFIGS.items()
    for name, fields in configs.items()
    if any(fields.get("text_config", fields).get(key) for key in COUNTS)
]


@pytest.mark.parametrize(("model_type", "name"), MIXTURES)
def test_experts_of_every_family_count_as_read_in_part(model_type: str, name: str) -> None:
    oracle = make_oracle(model_type, TINY_CONFIGS[model_type][name])
    stacks = [module for module in oracle.modules() if type(module).__name__.endswith("Experts")]
    hf_config = {"model_type": model_type, "architectures": [type(oracle).__name__], **TINY_CONFIGS[model_type][name]}
    tensors = make_checkpoint(hf_config, oracle.state_dict()).tensors
    of_experts = sum(values.numel() * values.itemsize for stack in stacks for values in stack.parameters())
    share = of_experts / sum(tensor.num_bytes for tensor in tensors.values())
    fields = vars(oracle.config.get_text_config())
    chosen, count = (
        next(fields[key] for key in keys if fields.get(key))
        for keys in (("num_experts_per_tok", "top_k_experts"), COUNTS)
    )
    model = weigh(ModelRegistry.make_model_config(hf_config), tensors)
    assert 0 < share < 1
    assert (model.chosen_share, model.expert_share) == (chosen / count, pytest.approx(share if chosen < count else 0))


# --- MXFP4 ----------------------------------------------------------------------------------------


MXFP4 = {
    **LLAMA, "head_dim": 16, "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 6, "rope_parameters": {"rope_theta": 700.0, "rope_type": "default"},
}  # fmt: skip


def save_mxfp4(directory: Path) -> Pair:
    """Write gpt-oss as it is published: nibbles and scales of experts. Returns the oracle with their values."""
    pair, random = Pair("gpt_oss", MXFP4), np.random.default_rng(0)
    tensors = {}
    for name, values in pair.oracle.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = values.clone()
            continue
        num_experts, num_inputs, num_rows = values.shape
        blocks = random.integers(0, 256, (num_experts, num_rows, num_inputs // 32, 16), dtype=np.uint8)
        scales = random.integers(122, 126, blocks.shape[:-1], dtype=np.uint8)
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        values.copy_(convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"]).float())
    save_file(tensors, directory / "model.safetensors")
    config = pair.hf_config | {"quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(config))
    return pair


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_experts_have_the_values_of_transformers(tmp_path: Path, dtype: str) -> None:
    pair, token_ids = save_mxfp4(tmp_path), random_tokens(9, 53)
    checkpoint = open_saved(tmp_path)
    runner = PlanRunner(make_config(checkpoint.hf_config, dtype=dtype), checkpoint)
    found, expected = runner.run(runner.add(token_ids)), pair.expected(token_ids)
    if dtype == "float32":
        assert_close(found, expected)
    assert functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99
    formats = {op.packing.name for op in runner.planned.ops if isinstance(op, ExpertGemm)}
    assert formats == {"f32" if dtype == "float32" else "mxfp4"}
    stacks = [tensor for tensor in checkpoint.tensors.values() if tensor.format == "MXFP4"]
    in_file = sum(math.prod(tensor.shape) for tensor in stacks) * 17 // 32
    assert sum(tensor.num_bytes for tensor in stacks) == in_file
    assert in_file <= kept_bytes(stacks) <= 1.05 * in_file


def test_mxfp4_experts_are_split_among_ranks(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    checkpoint = open_saved(tmp_path)
    config = make_config(checkpoint.hf_config)
    whole: Any = load_model(config, checkpoint).layers[0].mlp.experts
    for rank in range(2):
        mine: Any = load_model(config, checkpoint, group=LocalGroup(rank, 2)).layers[0].mlp.experts
        assert torch.equal(mine.down_proj, whole.down_proj.chunk(2, 1)[rank])
        gates_ups = whole.gate_up_proj.view(4, 2, 128, 64).chunk(2, 2)[rank]
        assert torch.equal(mine.gate_up_proj, gates_ups.reshape(-1, 64))


def test_mxfp4_nibbles_without_scales_are_named(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"down_proj_blocks' \[4, 64, 4, 16\] lacks bytes .*_scales' \[4, 64, 4\]"):
        open_saved(tmp_path)


# --- Quantised weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_experts_give_a_request_the_bits_that_it_has_alone(pair: Pair, quantization: str) -> None:
    options = {"dtype": "bfloat16", "quantization": quantization}
    prompts = [random_tokens(length, 53, seed) for seed, length in enumerate((21, 1, 14))]
    alone = pair.runner(**options)
    runner = pair.runner(**options, num_threads=2)
    streams = [runner.add(token_ids) for token_ids in prompts]
    together = runner.step([(stream, len(stream.token_ids)) for stream in streams])
    for token_ids, found in zip(prompts, together, strict=True):
        expected = alone.run(alone.add(token_ids), 7)
        assert torch.equal(found, expected)
        assert functional.cosine_similarity(found.flatten(), pair.expected(token_ids).flatten(), dim=0) > 0.9


def test_routers_are_not_quantised(pair: Pair) -> None:
    runner = pair.runner(dtype="bfloat16", quantization="int4")
    formats = {name: op.describe(1).split()[-1] for op in runner.planned.ops
               for name in [type(op).__name__] if tuple(getattr(op, "weight", NO_ROWS).shape) == (8, 64)}  # fmt: skip
    assert formats == {"Gemm": "bf16"}
    assert {op.packing.name for op in runner.planned.ops if isinstance(op, ExpertGemm)} == {"q4m"}


# --- Experts that a step reads --------------------------------------------------------------------


def timed(runner: PlanRunner, num_tokens: int) -> list[tuple[Any, OpTime]]:
    """Yield each instruction of a step with a new request, and its measured work."""
    stream = runner.add(random_tokens(num_tokens, 53))
    for ids in stream.block_ids:
        ids += [runner.free.pop() for _ in range(-(-num_tokens // runner.block_size))]
        runner.tables[0, len(runner.streams) - 1, : len(ids)] = ids
    row = np.array([len(runner.streams) - 1], np.int32)
    counts = np.array([num_tokens], np.int32)
    times = runner.planned.run_timed(BODY, row, 0 * row, counts, NO_ROWS, runner.tokens, runner.tables)
    return list(zip(runner.planned.ops, times, strict=False))


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "quantization": "int8"}])
def test_one_token_reads_the_bytes_that_were_predicted(pair: Pair, options: dict[str, Any]) -> None:
    step = StepShape(((0, 1),))
    found = [(op, time) for op, time in timed(pair.runner(**options), 1) if isinstance(op, ExpertGemm)]
    assert len(found) == 2 * 2
    for op, time in found:
        per_weight = 4 if not options else 1 + 2 / 32
        assert time.num_bytes == op.cost(step).bytes_read == 2 * op.weight.numel() // 8 * per_weight
        assert time.flops == op.cost(step).flops == 2 * 2 * op.weight.numel() // 8


def test_step_counts_its_distinct_experts_and_their_tokens(pair: Pair) -> None:
    runner = pair.runner()
    for num_tokens in (1, 3, 40):
        loads: tuple[int, ...] = ()
        for op, time in timed(runner, num_tokens):
            assert bool(time.expert_loads) == isinstance(op, Route)
            loads = time.expert_loads or loads
            if isinstance(op, Route):
                assert (len(loads), sum(loads)) == (8, 2 * num_tokens)
            if isinstance(op, ExpertGemm):
                assert time.num_bytes == sum(load > 0 for load in loads) * 4 * op.weight.numel() // 8


def test_recorded_steps_hold_the_load_of_each_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_tiny_directory(tmp_path)
    fields = json.loads((directory / "config.json").read_text())
    fields |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6, "head_dim": 4,
               "num_experts_per_tok": 3, "moe_intermediate_size": 8}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(fields))
    monkeypatch.setenv("QUIRE_TRACE", "events")
    engine = LLMEngine.from_options(
        str(directory), load_format="dummy", dtype="float32", num_blocks_override=16, device="cpu"
    )
    engine.add_request("a", {"prompt_token_ids": [5, 9, 2]}, SamplingParams(temperature=0, max_tokens=2))
    run(engine)
    prefill, *_ = engine.events.of(EventKind.OPS)
    loads = [op.expert_loads for op in prefill.data["ops"] if op.expert_loads]
    assert [op.layer for op in prefill.data["ops"] if op.expert_loads] == [0, 1]
    assert [prefill.data["ops"][at].layer for at in (0, -1)] == [None, None]
    assert [(len(load), sum(load)) for load in loads] == [(6, 9), (6, 9)]
