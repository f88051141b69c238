"""Models from outside: a subclass of `LlamaForCausalLM` changes attention, rotation or activation, planned or not."""

import itertools
import logging
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from quire.engine.llm_engine import LLMEngine
from quire.errors import UnsupportedModelError
from quire.kernels.activations import gelu_tanh_and_mul, relu, relu2_and_mul, silu
from quire.kernels.elementwise import soft_cap
from quire.layers.group import Group
from quire.layers.linear import Linear
from quire.layers.rotary import RotaryEmbedding
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from quire.models.registry import ModelRegistry
from quire.runtime.forward import EagerForward, PlannedForward
from quire.runtime.loader import make_model
from quire.sampling_params import SamplingParams
from tests.cli.tiny_directory import make_tiny_directory
from tests.engine.builders import run
from tests.models.harness import Runner, build_model, random_tokens
from tests.models.tiny_configs import LLAMA, full_config
from tests.runtime.plan.harness import PlanRunner, make_checkpoint, make_config

TOKENS = random_tokens(11, 53)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, initializer_range=0.2))
    return oracle.state_dict()


@pytest.fixture(autouse=True)
def forget_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "_registered", {})


def logits(model_class: type[LlamaForCausalLM], state: dict[str, torch.Tensor], fields: dict[str, Any]) -> torch.Tensor:
    ModelRegistry.register_model("LlamaForCausalLM", model_class)
    runner = Runner(build_model(full_config("llama", fields), state))
    return runner.run(runner.add(TOKENS))


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.gelu(gate) * up


class GeluMLP(LlamaMLP):
    activation = staticmethod(gelu_and_mul)


class WithGelu(LlamaForCausalLM):
    mlp_class = GeluMLP


class StretchedRotary(LlamaForCausalLM):
    def build_rotary(self, config: LlamaConfig) -> RotaryEmbedding:
        return RotaryEmbedding(config.rope.frequencies(config.head_size) / 4)


class GatedAttention(LlamaAttention):
    """A gate per head and token, as some models put behind attention."""

    def __init__(self, config: LlamaConfig, layer_index: int, group: Group) -> None:
        super().__init__(config, layer_index, group)
        self.gate = Linear(config.hidden_size, config.num_heads)

    def forward(self, x: torch.Tensor, rotation: Any, batch: Any) -> torch.Tensor:
        return super().forward(x, rotation, batch) * self.gate(x).sigmoid().mean(-1, keepdim=True)


class WithGates(LlamaForCausalLM):
    attention_class = GatedAttention


class WithoutFirstAttention(LlamaForCausalLM):
    def build_attention(self, config: LlamaConfig, layer_index: int) -> torch.nn.Module:
        return super().build_attention(config, layer_index) if layer_index else NoAttention()


class NoAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor, rotation: Any, batch: Any) -> torch.Tensor:
        return torch.zeros_like(x)


def test_another_activation(state: dict[str, torch.Tensor]) -> None:
    config = transformers.LlamaConfig(**{**LLAMA, "hidden_act": "gelu"})
    oracle = transformers.LlamaForCausalLM(config).eval()
    oracle.load_state_dict(state)
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(WithGelu, state, LLAMA), expected, atol=1e-4, rtol=1e-4)


def test_another_rotation(state: dict[str, torch.Tensor]) -> None:
    scaled = {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    found = logits(StretchedRotary, state, LLAMA)
    torch.testing.assert_close(found, logits(LlamaForCausalLM, state, scaled))
    assert not torch.allclose(found, logits(LlamaForCausalLM, state, LLAMA), atol=1e-3)


def test_another_attention(state: dict[str, torch.Tensor]) -> None:
    """Gates of sigmoid(0) halve what attention adds; so does half an output projection."""
    gates = {f"model.layers.{i}.self_attn.gate.weight": torch.zeros(4, 48) for i in range(2)}
    halved = {name: value / 2 if "o_proj" in name else value for name, value in state.items()}
    torch.testing.assert_close(logits(WithGates, {**state, **gates}, LLAMA), logits(LlamaForCausalLM, halved, LLAMA))


def test_another_attention_in_one_layer(state: dict[str, torch.Tensor]) -> None:
    removed = {name: value * 0 if "layers.0.self_attn.o_proj" in name else value for name, value in state.items()}
    others = {name: value for name, value in state.items() if "layers.0.self_attn" not in name}
    found = logits(WithoutFirstAttention, others, LLAMA)
    torch.testing.assert_close(found, logits(LlamaForCausalLM, removed, LLAMA))


# --- Through the engine -------------------------------------------------------------------------


def test_example_of_linear_attention_equals_attention_without_a_softmax() -> None:
    """Planned and op by op, in chunks and in decodes."""
    linear_llama: type[LlamaForCausalLM] = runpy.run_path(str(EXAMPLES / "linear_attention.py"))["LinearLlama"]

    class Quadratic(linear_llama.attention_class):  # type: ignore[name-defined, misc]
        def forward(self, x: torch.Tensor, rotation: Any, batch: Any) -> torch.Tensor:
            q, k, v = self.qkv_proj(x).view(len(x), 3, -1, self.head_size).permute(1, 2, 0, 3)  # [H, T, D]
            scores = (functional.silu(q) @ functional.silu(k).transpose(1, 2)).tril()
            return self.o_proj(self.norm((scores @ v).transpose(0, 1)).flatten(1))

    class QuadraticLlama(linear_llama):  # type: ignore[misc, valid-type]
        attention_class = Quadratic

    for name, model_class in (("Linear", linear_llama), ("Quadratic", QuadraticLlama)):
        ModelRegistry.register_model(name, model_class)
    fields = {**full_config("llama", LLAMA), "num_key_value_heads": 4}
    generator = torch.Generator().manual_seed(3)
    state = {
        name: torch.randn(parameter.shape, generator=generator) * max(parameter.shape[-1] ** -0.5, parameter.ndim == 1)
        for name, parameter in make_model(fields | {"architectures": ["Linear"]}).named_parameters()
        if "proj" not in name
    }
    sizes = {"q": (48, 48), "k": (48, 48), "v": (48, 48), "o": (48, 48)}
    sizes |= {"gate": (40, 48), "up": (40, 48), "down": (48, 40)}
    for layer, (name, size) in itertools.product(range(2), sizes.items()):
        part = "self_attn" if size == (48, 48) else "mlp"
        values = torch.randn(size, generator=generator) * size[1] ** -0.5
        state[f"model.layers.{layer}.{part}.{name}_proj.weight"] = values
    quadratic = Runner(build_model(fields | {"architectures": ["Quadratic"]}, state))
    linear = fields | {"architectures": ["Linear"]}
    expected = quadratic.run(quadratic.add(TOKENS))
    for runner in (Runner(build_model(linear, state)), PlanRunner(make_config(linear), make_checkpoint(linear, state))):
        stream = runner.add(TOKENS)
        found = torch.cat([*runner.step([(stream, 7)]), runner.run(stream, 1)])
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=False)


def engine_of(directory: Path, model_class: type[LlamaForCausalLM], **options: Any) -> LLMEngine:
    ModelRegistry.register_model("LlamaForCausalLM", model_class)
    options = {"load_format": "dummy", "dtype": "float32", "num_blocks_override": 16, "device": "cpu", **options}
    return LLMEngine.from_options(str(directory), **options)


def forward_of(engine: LLMEngine) -> Any:
    return engine._executor._worker.forward  # type: ignore[attr-defined]


def greedy_tokens(engine: LLMEngine) -> list[int]:
    engine.add_request("a", {"prompt_token_ids": TOKENS}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    token_ids: list[int] = run(engine)[-1].outputs[0].token_ids
    return token_ids


def test_plan_holds_other_frequencies(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(directory, StretchedRotary)
    assert isinstance(forward_of(engine), PlannedForward)
    assert not warnings_of(caplog)
    found = greedy_tokens(engine)
    assert found == greedy_tokens(engine_of(directory, StretchedRotary, enforce_eager=True))
    assert found != greedy_tokens(engine_of(directory, LlamaForCausalLM))


ACTIVATIONS = {
    "kernels' own gate": gelu_tanh_and_mul,
    "kernels' own squared gate": relu2_and_mul,
    "torch's, gate first": gelu_and_mul,
    "torch's, up first": lambda gate_up: gate_up.chunk(2, -1)[1] * functional.gelu(
        gate_up.chunk(2, -1)[0], approximate="tanh"
    ),
    "product of activated halves": lambda gate_up: relu(gate_up).chunk(2, -1)[0] * gate_up.chunk(2, -1)[1],
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_plan_holds_another_activation(directory: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    class Changed(LlamaForCausalLM):
        class mlp_class(LlamaMLP):  # a class attribute of this name
            activation = staticmethod(ACTIVATIONS[name])

    check_planned(directory, Changed, caplog)


class PlainMLP(torch.nn.Module):
    """SiLU without a gate: the checkpoint's up and down projections."""

    def __init__(self, config: LlamaConfig, group: Group) -> None:
        super().__init__()
        self.up = Linear(config.hidden_size, config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.up(x)))


class WithoutGate(LlamaForCausalLM):
    mlp_class = PlainMLP


class WithMultipliers(LlamaForCausalLM):
    """Multiples of embeddings and logits, and capped logits."""

    def forward(self, token_ids: torch.Tensor, batch: Any) -> torch.Tensor:
        x = self.embed_tokens(token_ids) * 12.0
        rotation = self.rotary(batch.positions)
        for layer in self.layers:
            x = layer(x, rotation, batch)
        return self.norm(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return soft_cap(super().compute_logits(hidden) / 0.5, 30.0)


@pytest.mark.parametrize("model_class", [WithoutGate, WithMultipliers])
def test_plan_holds_other_layers_and_heads(
    directory: Path, caplog: pytest.LogCaptureFixture, model_class: type[LlamaForCausalLM]
) -> None:
    check_planned(directory, model_class, caplog)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def check_planned(directory: Path, model_class: type[LlamaForCausalLM], caplog: pytest.LogCaptureFixture) -> None:
    """Planned without a warning, with the tokens and log-probabilities that it has op by op."""
    engine = engine_of(directory, model_class)
    assert isinstance(forward_of(engine), PlannedForward)
    assert not warnings_of(caplog)
    assert greedy_tokens(engine) == greedy_tokens(engine_of(directory, model_class, enforce_eager=True))


@pytest.mark.parametrize(
    ("model_class", "words"), [(WithGates, ".sigmoid of a value"), (WithoutFirstAttention, "torch's zeros_like")]
)
def test_what_a_plan_cannot_hold_runs_op_by_op_and_says_so(
    directory: Path, caplog: pytest.LogCaptureFixture, model_class: type[LlamaForCausalLM], words: str
) -> None:
    engine = engine_of(directory, model_class)
    assert isinstance(forward_of(engine), EagerForward)
    (record,) = warnings_of(caplog)
    assert record.levelname == "WARNING"
    assert "op by op" in record.getMessage()
    assert words in record.getMessage()


@pytest.mark.parametrize("option", [{"kv_cache_dtype": "int8"}, {"quantization": "int4", "dtype": "auto"}])
def test_options_that_need_a_plan_are_refused_where_there_is_none(directory: Path, option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"\.sigmoid.*kv_cache_dtype and quantization unset") as raised:
        engine_of(directory, WithGates, **option)
    assert "\n" not in str(raised.value)
    assert isinstance(forward_of(engine_of(directory, StretchedRotary, **option)), PlannedForward)


def test_debugging_variables_run_op_by_op(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KERNELS", "reference")
    assert isinstance(forward_of(engine_of(directory, LlamaForCausalLM)), EagerForward)
    with pytest.raises(UnsupportedModelError, match="QUIRE_KERNELS=reference"):
        engine_of(directory, LlamaForCausalLM, kv_cache_dtype="int8")
