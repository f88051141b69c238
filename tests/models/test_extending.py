"""Models from outside: a subclass of `LlamaForCausalLM` changes attention, rotation or activation; tracing works."""

import operator
from typing import Any

import pytest
import torch
import transformers
from torch import fx
from torch.nn import functional

from quire.kernels import registry
from quire.kernels.activations import silu_and_mul
from quire.kernels.layer_norm import layer_norm
from quire.kernels.linear import linear
from quire.kernels.paged_attention import paged_attention
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rope import rope
from quire.kernels.write_kv import write_kv
from quire.layers.linear import Linear, pack_weights
from quire.layers.rotary import RotaryEmbedding
from quire.models.llama import LlamaAttention, LlamaConfig, LlamaForCausalLM, LlamaMLP
from quire.models.registry import ModelRegistry
from tests.models.harness import Runner, build_model, random_tokens
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, full_config

KERNELS = (linear, rms_norm, layer_norm, rope, write_kv, paged_attention, silu_and_mul)
TOKENS = random_tokens(11, 53)


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

    def __init__(self, config: LlamaConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
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
    found = logits(WithoutFirstAttention, state, LLAMA)
    torch.testing.assert_close(found, logits(LlamaForCausalLM, removed, LLAMA))


@pytest.mark.parametrize("model_type", sorted(TINY_CONFIGS))
def test_a_trace_has_one_call_per_kernel_and_computes_the_same(model_type: str) -> None:
    """What a captured plan needs: no control flow on tensors, kernels as single calls, the batch passed through."""
    fields = next(iter(TINY_CONFIGS[model_type].values()))
    oracle = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**fields))
    model = build_model(full_config(model_type, fields), oracle.state_dict())
    graph = fx.Tracer(autowrap_functions=KERNELS).trace(model)
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called.count(paged_attention) == called.count(write_kv) == 2
    assert called.count(operator.getitem) > 0
    runner = Runner(model)
    stream = runner.add(TOKENS)
    batch = runner.make_batch([(stream, len(TOKENS))])
    with torch.inference_mode():
        expected = model(batch.token_ids, batch)
        runner.pool.fill_(torch.nan)
        assert torch.equal(fx.GraphModule(model, graph)(batch.token_ids, batch), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", sorted(TINY_CONFIGS))
def test_packed_weights_give_the_same_logits(model_type: str, dtype: torch.dtype) -> None:
    fields = next(iter(TINY_CONFIGS[model_type].values()))
    oracle = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**fields))
    model = build_model(full_config(model_type, fields), oracle.state_dict()).to(dtype)
    before = Runner(model)
    expected = before.run(before.add(TOKENS))
    pack_weights(model)
    after = Runner(model)
    found = after.run(after.add(TOKENS))
    assert expected.dtype == dtype
    assert (found - expected).abs().max() <= 8 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("model_type", sorted(TINY_CONFIGS))
def test_reference_kernels_give_the_same_logits(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """QUIRE_KERNELS=reference swaps every kernel in the whole model, to find the one at fault."""
    fields = next(iter(TINY_CONFIGS[model_type].values()))
    oracle = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**fields))
    model = build_model(full_config(model_type, fields), oracle.state_dict())
    found = []
    for setting in ("", "reference"):
        monkeypatch.setenv("QUIRE_KERNELS", setting)
        registry.forget_choices()
        runner = Runner(model)
        stream = runner.add(TOKENS)
        found.append(torch.cat([*runner.step([(stream, 7)]), runner.run(stream, 1)]))
    monkeypatch.undo()
    registry.forget_choices()
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[0].abs().max()
    assert not torch.equal(found[0], found[1])
