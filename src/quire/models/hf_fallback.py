"""`TransformersForCausalLM`: the fallback, which runs Transformers' own module with Quire's attention and KV cache.

`ModelRegistry` chooses it for a causal language model that has no file here, and `--model-impl transformers` for any.
Next to read: `hf_probe.py` for what is computed and what is refused, `runtime/fallback.py`, which loads the weights.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from quire.cache_spec import CacheSpec, PagedKV
from quire.errors import UnsupportedModelError
from quire.layers.attention import Attention
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group
from quire.models.hf_probe import ProbedLayer, make_module, probe, read_config, refused, take_decoder
from quire.weight_map import Layout

RUN = "quire"
"""Name of the attention function here in Transformers' table."""


@dataclass(frozen=True, kw_only=True)
class FallbackConfig:
    """Sizes that the probe found; heads and head size are the largest of any layer. `hf`: Transformers' config."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context_len: int
    hf: Any
    layers: tuple[ProbedLayer, ...]

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """Probe Transformers' module for this config. Raises: UnsupportedModelError naming what is not computed."""
        try:
            hf = read_config(hf_config)
            layers, text = probe(hf), hf.get_text_config()  # of a model that also sees or hears, which it does not here
            return cls(
                vocab_size=text.vocab_size,
                hidden_size=text.hidden_size,
                num_layers=len(layers),
                hf=hf,
                layers=layers,
                num_heads=max(layer.num_heads for layer in layers),
                num_kv_heads=max(layer.num_kv_heads for layer in layers),
                head_size=max(layer.head_size for layer in layers),
                context_len=text.max_position_embeddings,
            )
        except UnsupportedModelError:
            raise
        except Exception as error:  # any code of any model
            text = (str(error).splitlines() or [""])[0][:200]
            raise refused(hf_config.get("model_type"), f"running it fails: {type(error).__name__}: {text}") from error

    def kv_specs(self) -> list[CacheSpec]:
        return [PagedKV(layer.num_kv_heads, layer.head_size, 1, layer.window) for layer in self.layers]


class CurrentBatch:
    """The batch that a model computes now: `forward` sets it, attention reads it."""

    batch: ForwardBatch


class TransformersForCausalLM(nn.Module):
    """A causal language model of Transformers. Parameter names: `decoder.` and Transformers', `model.` for the head."""

    Config: ClassVar[type[FallbackConfig]] = FallbackConfig

    def __init__(self, config: FallbackConfig, group: Group = SINGLE, module: Any = None) -> None:
        """`module`: Transformers' model with the attention function `RUN`; made with random weights unless given."""
        super().__init__()
        importlib.import_module("transformers").AttentionInterface.register(RUN, _run)
        if group.size > 1:
            raise UnsupportedModelError("Transformers' modules run on one rank: --tensor-parallel-size 1 fits")
        self.config = config
        self.model = make_module(config.hf, RUN) if module is None else module
        self.decoder = take_decoder(self.model)
        self.step = CurrentBatch()
        for index, layer in enumerate(config.layers):
            attention = Attention(
                index, layer.head_size, scale=layer.scale, window=layer.window, soft_cap=layer.soft_cap
            )
            # The batch cannot be an argument: some of Transformers' layers do not pass keyword arguments on.
            self.decoder.get_submodule(layer.name).quire_attention = (attention, layer.head_size, self.step)

    def layout(self) -> Layout:
        """Return Transformers' names."""
        return Layout()

    def forward(self, token_ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states after the last norm. Shapes: token_ids [T] -> [T, E]."""
        self.step.batch = batch
        positions = batch.positions.unsqueeze(0)
        return self.decoder(input_ids=token_ids.unsqueeze(0), position_ids=positions, use_cache=False)[0].squeeze(0)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Shapes: hidden [S, E] -> [S, V]. The head's own code runs, with its scales and caps."""
        return self.model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)


def _run(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attend through block tables; heads of other sizes are filled with zeros. Shapes: as `hf_probe._record`."""
    attention, size, step = module.quire_attention
    q, k, v = (
        nn.functional.pad(rows.squeeze(0).transpose(0, 1), (0, size - rows.shape[-1])) for rows in (query, key, value)
    )  # [T, H, D], [T, K, D], [T, K, D]
    out = attention(q, k, v, step.batch, options.get("s_aux"))
    return out[..., : value.shape[-1]].unsqueeze(0), None
