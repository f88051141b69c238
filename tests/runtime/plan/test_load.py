"""From a checkpoint to a program with packed weights: formats, values, errors, and what quantisation costs."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import model_files
from quire.errors import ConfigError
from quire.kernels.instruction import StepShape
from quire.kernels.linear import Gemm
from quire.kernels.tracing import NotTraceableError
from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ModelRegistry
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.eager import load_model
from quire.runtime.plan.load import load_plan, trace_program
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.sources import resolve_source
from quire.weights.weight_tensor import WeightTensor
from tests.models.harness import Runner, build_model, random_tokens
from tests.models.tiny_configs import LLAMA, full_config
from tests.runtime.plan.harness import PlanRunner, make_checkpoint, make_config, packed, stored

FIELDS = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 96, "tie_word_embeddings": False}
HF_CONFIG = full_config("llama", FIELDS)
TOKENS = random_tokens(40, 96)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**FIELDS, initializer_range=0.15))
    return oracle.state_dict()


def load(checkpoint: Checkpoint, progress: Any = None, **options: Any) -> Any:
    config = make_config(HF_CONFIG, **options)
    return load_plan(config, checkpoint, CacheEngine(config).layer_groups, progress)


def formats_of(checkpoint: Checkpoint, **options: Any) -> dict[str, str]:
    """Return the format of each matrix of the first layer, of the embedding and of the head."""
    program, weights = load(checkpoint, **options)
    del program
    return {name: packing.name for name, packing in weights.packings.items() if "layers.1" not in name}


def test_stored_formats_stay_and_parts_of_a_stack_keep_theirs(state: dict[str, torch.Tensor]) -> None:
    checkpoint = make_checkpoint(
        HF_CONFIG, state, {"": "Q4_1", "v_proj": "Q8_0", "o_proj": "Q4_0", "down_proj": "Q5_0", "lm_head": "BF16"}
    )
    assert formats_of(checkpoint, dtype="auto") == {
        "embed_tokens.weight": "q4m", "lm_head.weight": "bf16", "layers.0.self_attn.qkv_proj.weight": "q4m+q8",
        "layers.0.self_attn.o_proj.weight": "q4", "layers.0.mlp.gate_up_proj.weight": "q4m",
        "layers.0.mlp.down_proj.weight": "q5",
    }  # fmt: skip
    assert set(formats_of(checkpoint, dtype="float32").values()) == {"f32"}


@pytest.mark.model
def test_packed_bytes_of_a_q4_k_m_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packed weights are larger than the file by the scales of Q4_K, each of which is a byte instead of six bits."""
    monkeypatch.setitem(model_files.SHAPES, "tiny", model_files.Shape(256, 8, 4, 512, 2, 64, 49152))
    model_files.write_model("tiny", "Q4_K_M", tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(resolve_source(str(tmp_path / "tiny.gguf")))
    config = make_config(checkpoint.hf_config, dtype="bfloat16")
    program, weights, _ = trace_program(config, checkpoint, CacheEngine(config).layer_groups)
    names = [packing.name for name, packing in weights.packings.items() if "qkv_proj" in name]
    assert names == ["q4k+q6k", "q4k", "q4k", "q4k+q6k", "q4k", "q4k", "q4k+q6k", "q4k+q6k"]
    file_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    assert file_bytes < weights.num_bytes < 1.02 * file_bytes
    step = StepShape(((0, 1),), num_logit_rows=1)
    products = [op for op in (*program.body, *program.head) if isinstance(op, Gemm)]
    num_read = sum(op.cost(step).bytes_read for op in products)
    assert num_read == sum(packing.num_bytes(weights.shapes[name][1]) for name, packing in weights.packings.items())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_quantised_files_compute_with_the_values_in_them(state: dict[str, torch.Tensor], dtype: str) -> None:
    """`float32` dequantises; the others round activations to int8, but not the weights."""
    checkpoint = make_checkpoint(HF_CONFIG, state, {"": "Q4_1", "o_proj": "Q4_0", "v_proj": "Q8_0", "embed": "Q8_0"})
    values = {name: tensor.to_torch(torch.float32) for name, tensor in checkpoint.tensors.items()}
    eager = Runner(build_model(HF_CONFIG, values))
    expected = eager.run(eager.add(TOKENS))
    runner = PlanRunner(make_config(HF_CONFIG, dtype=dtype), checkpoint)
    found = runner.run(runner.add(TOKENS))
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < (1e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize(("quantization", "format_name"), [("int8", "q8"), ("int4", "q4m")])
def test_weights_quantised_at_load_are_computed_with(
    state: dict[str, torch.Tensor], quantization: str, format_name: str
) -> None:
    def quantised(name: str, values: torch.Tensor) -> torch.Tensor:
        is_table = "embed" in name or "lm_head" in name
        return packed("q8" if is_table else format_name, stored(name, values))[0] if values.ndim == 2 else values

    eager = Runner(build_model(HF_CONFIG, {name: quantised(name, values) for name, values in state.items()}))
    expected = eager.run(eager.add(TOKENS))
    config = make_config(HF_CONFIG, dtype="auto", quantization=quantization, kv_cache_dtype="float32")
    runner = PlanRunner(config, make_checkpoint(HF_CONFIG, state))
    found = runner.run(runner.add(TOKENS))
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.03


@pytest.mark.parametrize(
    ("kv_cache_dtype", "most"), [("float16", 2e-3), ("int8", 4e-2), ("fp8", 0.15), ("fp8_e5m2", 0.3)]
)
def test_kv_types(state: dict[str, torch.Tensor], kv_cache_dtype: str, most: float) -> None:
    eager = Runner(build_model(HF_CONFIG, state))
    expected = eager.run(eager.add(TOKENS))
    config = make_config(HF_CONFIG, dtype="float32", kv_cache_dtype=kv_cache_dtype)
    runner = PlanRunner(config, make_checkpoint(HF_CONFIG, state))
    error = float((runner.run(runner.add(TOKENS), 7) - expected).abs().max() / expected.abs().max())
    assert error < most


def test_random_weights_are_those_of_the_eager_model() -> None:
    config = make_config(HF_CONFIG, load_format="dummy", seed=5)
    empty = make_checkpoint(HF_CONFIG, {})
    eager = Runner(load_model(config, empty))
    runner = PlanRunner(config, empty)
    found, expected = runner.run(runner.add(TOKENS)), eager.run(eager.add(TOKENS))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@dataclass
class Watched:
    """A tensor that notes when it is read."""

    tensor: WeightTensor
    reads: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name in ("raw", "to_torch", "to_numpy", "stored"):
            self.reads.append(name)
        return getattr(self.tensor, name)


def test_what_cannot_be_traced_is_known_before_a_weight_is_read(
    state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(LlamaForCausalLM):
        def forward(self, token_ids: Any, batch: Any) -> Any:
            return super().forward(token_ids, batch) - 2

    monkeypatch.setattr(ModelRegistry, "_registered", {"LlamaForCausalLM": Scaled})
    checkpoint = make_checkpoint(HF_CONFIG, state)
    watched = {name: Watched(tensor) for name, tensor in checkpoint.tensors.items()}
    object.__setattr__(checkpoint, "tensors", watched)
    with pytest.raises(NotTraceableError, match="unsupported operand"):
        load(checkpoint)
    assert not any(tensor.reads for tensor in watched.values())


def test_each_tensor_is_read_once_and_progress_counts_them(state: dict[str, torch.Tensor]) -> None:
    checkpoint = make_checkpoint(HF_CONFIG, state, {"": "Q4_1"})
    watched = {name: Watched(tensor) for name, tensor in checkpoint.tensors.items()}
    object.__setattr__(checkpoint, "tensors", watched)
    calls: list[tuple[int, int]] = []
    load(checkpoint, lambda stage, done, total: calls.append((done, total)), dtype="auto")
    assert all(len(tensor.reads) == 1 for tensor in watched.values())
    total = sum(tensor.num_bytes for tensor in watched.values())
    assert calls[-1] == (total, total)
    assert len(calls) == len(watched)


def test_chosen_kernels_need_to_run_one_by_one_and_traces_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = make_checkpoint(HF_CONFIG, {})
    monkeypatch.setenv("QUIRE_TRACE", "1")
    load(empty, load_format="dummy")
    monkeypatch.setenv("QUIRE_KERNELS", "reference")
    with pytest.raises(NotTraceableError, match="QUIRE_KERNELS=reference"):
        load(empty, load_format="dummy")
    for variable in ("QUIRE_KERNELS", "QUIRE_TRACE"):
        monkeypatch.setenv(variable, "nonsense")
        with pytest.raises(ConfigError, match=variable):
            load(empty, load_format="dummy")
        monkeypatch.setenv(variable, "")
