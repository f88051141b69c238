"""`quire diff`: equal models are equal, a wrong one is found at the module that is wrong."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import _native
from quire.config import EngineOptions
from quire.extras import install_command
from quire.kernels.activations import relu2_and_mul
from quire.models.llama import LlamaForCausalLM, LlamaMLP
from quire.models.registry import ModelRegistry
from quire.runtime.forward import PlannedForward
from quire_workshop.diff import compare_with_hf
from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import make_tiny_directory
from tests.models.oracle import Pair
from tests.models.test_experts import open_saved
from tests.models.tiny_configs import TINY_CONFIGS


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_directory(tmp_path_factory.mktemp("diff") / "tiny"))


@pytest.fixture(autouse=True)
def forget_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})


class SecondMLP(LlamaMLP):
    """Another activation in the second layer only."""

    num_built = 0

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        SecondMLP.num_built += 1
        self.is_wrong = SecondMLP.num_built % 2 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_wrong:
            return super().forward(x)
        return self.down_proj(relu2_and_mul(self.gate_up_proj(x)))


class WithWrongMLP(LlamaForCausalLM):
    mlp_class = SecondMLP


def test_right_model_is_equal_in_every_tensor_and_on_every_instruction_set(directory: str) -> None:
    value = parsed(call("diff", directory, "--bisect", "--tolerance", "1e-4", "--json"))
    names = [row["name"] for row in value["rows"]]
    assert value["first"] is None
    assert {"embed_tokens", "layers.0.self_attn.qkv_proj", "layers.1.mlp", "layers.1", "norm"} <= set(names)
    assert names[-2:] == ["logits", "logits of the plan"]
    assert {"scalar", "avx2"} <= {row["name"] for row in value["kernels"]}
    assert all(row["share"] < 1e-4 for row in value["rows"] + value["kernels"])


def test_first_wrong_module_is_named_with_its_source(directory: str) -> None:
    ModelRegistry.register_model("LlamaForCausalLM", WithWrongMLP)
    result = call("diff", directory)
    assert result.exit_code == 6
    assert "first tensor out of tolerance: layers.1.mlp.down_proj" in result.stdout
    assert "layers.1.mlp.gate_up_proj before it is equal" in result.stdout


def test_bisect_names_the_kernels_at_fault(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PlannedForward.logits

    def logits(forward: PlannedForward, rows: Any) -> Any:
        return right(forward, rows) + (_native.isa() == "scalar")

    monkeypatch.setattr(PlannedForward, "logits", logits)
    result = call("diff", directory, "--bisect")
    assert result.exit_code == 6
    assert "the plan with scalar kernels DEPARTS from the model op by op" in result.stdout
    assert "the plan with avx2 kernels equals the model op by op" in result.stdout


def test_bad_input_is_one_line(directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no tokens" in call("diff", directory, "--prompt", "", "--quiet").stderr
    assert call("diff", "./no-such-model", "--quiet").exit_code == 3
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = call("diff", directory, "--quiet")
    assert result.exit_code == 2
    assert result.stderr == f"error[invalid_option]: --ref hf needs Transformers: {install_command('hf')}\n"


@pytest.mark.parametrize(
    ("model_type", "modules"),
    [
        ("gpt2", {"embed_tokens", "embed_positions", "layers.0.self_attn.qkv_proj", "layers.1.mlp", "norm"}),
        ("gpt_neox", {"embed_tokens", "layers.0.self_attn.qkv_proj", "layers.1.mlp"}),
        ("glm4", {"layers.0.self_attn.qkv_proj", "layers.1.mlp.gate_up_proj"}),
        ("lfm2", {"layers.0.input_layernorm", "layers.1.mlp", "layers.1.mlp.gate_up_proj", "norm"}),
        ("mixtral", {"layers.0.mlp", "layers.1.mlp.experts"}),
        ("gpt_oss", {"layers.0.mlp", "layers.1.self_attn.qkv_proj"}),
    ],
)
def test_modules_under_other_names_and_in_other_orders_are_compared(
    tmp_path: Path, model_type: str, modules: set[str]
) -> None:
    pair = Pair(model_type, next(iter(TINY_CONFIGS[model_type].values())))
    pair.oracle.save_pretrained(tmp_path)
    rows = compare_with_hf(EngineOptions(model=str(tmp_path)), open_saved(tmp_path), tmp_path, [3, 1, 4, 1, 5])
    assert modules <= {row.name for row in rows}
    assert {row.name: row.share for row in rows if row.share > 1e-4} == {}
