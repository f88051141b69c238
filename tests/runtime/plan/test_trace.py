"""Whole models on symbols: what each architecture calls, and which models cannot be traced, with the reason."""

from typing import Any

import pytest
import torch
from torch import nn

from quire.errors import ConfigError
from quire.kernels.linear import linear
from quire.kernels.rms_norm import rms_norm
from quire.kernels.tracing import NotTraceableError
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norms import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.runtime.loader import make_model
from quire.runtime.plan.trace import trace_model
from tests.models.tiny_configs import TINY_CONFIGS, full_config


@pytest.mark.parametrize("model_type", sorted(TINY_CONFIGS))
def test_every_architecture_is_traced_with_one_call_per_kernel(model_type: str) -> None:
    """On the meta device, so that no weight exists."""
    fields = next(iter(TINY_CONFIGS[model_type].values()))
    with torch.device("meta"):
        model = make_model(full_config(model_type, fields))
    traced = trace_model(model, (0,) * model.config.num_layers)
    num_attending = sum(not spec.is_state for spec in model.config.kv_specs())
    called = [call.operation for call in traced.forward.calls]
    attention, write = ("paged_attention", "write_kv")
    if model_type.startswith("deepseek"):
        attention, write = ("latent_attention", "write_latent")
    num_shared = model.config.num_layers - len(model.config.kv_specs())  # layers that attend to others' keys
    assert (called.count(attention), called.count(write)) == (num_attending + num_shared, num_attending)
    assert called.count("linear") == sum(
        isinstance(module, Linear) and name != "lm_head" for name, module in model.named_modules()
    )
    assert traced.hidden.call is traced.forward.calls[-1]
    in_head = [call.operation for call in traced.head.calls]
    assert [operation for operation in in_head if operation not in ("scale", "soft_cap")] == ["hidden", "linear"]
    assert traced.logits.sizes == (53,)


class Plain(nn.Module):
    """Embedding, norm and a linear layer; `middle` is what a test puts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(10, 8)
        self.norm = RMSNorm(8, 1e-5)
        self.up = Linear(8, 8)
        self.attention = Attention(0, 2)

    def forward(self, token_ids: Any, batch: Any) -> Any:
        return self.norm(self.middle(self.embedding(token_ids), batch))

    def middle(self, x: Any, batch: Any) -> Any:
        return self.up(x)

    def compute_logits(self, hidden: Any) -> Any:
        return self.embedding.as_head(hidden)


def model_with(**methods: Any) -> nn.Module:
    return type("Changed", (Plain,), methods)()


def test_batch_has_the_layers_caches_and_groups() -> None:
    seen: list[Any] = []

    def middle(self: Any, x: Any, batch: Any) -> Any:
        seen.append(batch)
        return x

    trace_model(model_with(middle=middle), (0, 1, 0))
    (batch,) = seen
    assert [(cache.layer_index, cache.group_index) for cache in batch.kv_caches] == [(0, 0), (1, 1), (2, 0)]
    assert batch.layer_groups == (0, 1, 0)
    assert len(batch.slot_mapping) == 2


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"middle": lambda self, x, batch: x - 2}, "TypeError: unsupported operand"),
        ({"middle": lambda self, x, batch: x[:, :4]}, "TypeError: .* not subscriptable"),
        ({"middle": lambda self, x, batch: x + batch.positions.float()}, ".float of a value"),
        ({"middle": lambda self, x, batch: nn.functional.mish(x)}, "torch's mish"),
        ({"middle": lambda self, x, batch: x.view(x.shape[0] // 2, 16)}, "TypeError"),
        ({"middle": lambda self, x, batch: x.view(-1, x.shape[2])}, "IndexError"),
        ({"middle": lambda self, x, batch: self.up(x) if batch.seq_lens else x}, "the batch's seq_lens"),
        ({"middle": lambda self, x, batch: self.up(x) if max(batch.query_lens_list) > 1 else x}, "query_lens_list"),
        ({"middle": lambda self, x, batch: x.view(-1, 2, 2, 2)}, "a norm with"),
        ({"middle": lambda self, x, batch: None}, "NoneType"),
        ({"forward": lambda self, ids, batch: self.embedding(ids).view(-1, 2, 4)}, "a result that is not one value"),
        ({"forward": lambda self, ids, batch: self.embedding(ids).chunk(2, 1)[0]}, "a result that is not one value"),
        ({"forward": lambda self, ids, batch: (self.embedding(ids), None)}, "a result that is not one value"),
        ({"compute_logits": lambda self, hidden: self.embedding.as_head(hidden).float()}, ".float of a value"),
    ],
)
def test_other_models_are_refused_with_the_reason(methods: dict[str, Any], words: str) -> None:
    with pytest.raises(NotTraceableError, match=words):
        trace_model(model_with(**methods), (0,))


def test_computed_weights_are_refused() -> None:
    """They would be packed before they are known."""

    def doubled(self: Any, x: Any, batch: Any) -> Any:
        return linear(x, self.up.weight * 2, None)

    def shifted(self: Any, x: Any, batch: Any) -> Any:
        return rms_norm(x, self.norm.weight + 1, 1e-5)

    for middle in (doubled, shifted):
        with pytest.raises(NotTraceableError, match="'Parameter' and 'int'"):
            trace_model(model_with(middle=middle), (0,))


def test_tensors_that_are_no_parameters_are_no_weights() -> None:
    model = Plain()
    model.up.weight = torch.zeros(8, 8)  # type: ignore[assignment]
    with pytest.raises(NotTraceableError, match="weights of linear that are computed"):
        trace_model(model, (0,))


def test_frequencies_need_values() -> None:
    def middle(self: Any, x: Any, batch: Any) -> Any:
        RotaryEmbedding(torch.ones(2, device=device))(batch.positions)
        return x

    device = "cpu"
    trace_model(model_with(middle=middle), (0,))
    device = "meta"
    with pytest.raises(NotTraceableError, match="frequencies without values"):
        trace_model(model_with(middle=middle), (0,))


def test_errors_on_purpose_are_passed_on() -> None:
    def middle(self: Any, x: Any, batch: Any) -> Any:
        raise ConfigError("a wrong option")

    with pytest.raises(ConfigError, match="a wrong option"):
        trace_model(model_with(middle=middle), (0,))
