"""`TransformersForCausalLM`: the fallback, which runs Transformers' own module with Quire's attention and KV cache.

`ModelRegistry` chooses it for a causal language model that has no file here, and `--model-impl transformers` for any.
The module runs once on the meta device with an attention function that records its arguments, and a mask function that
tells which keys a query sees: heads, windows, scales, soft caps and sinks are those that the module computes with,
whatever its config says. What `paged_attention` does not compute is refused. Next to read: `runtime/fallback.py`, which
loads the weights.
"""

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from quire.cache_spec import CacheSpec, PagedKV
from quire.errors import UnsupportedModelError
from quire.layers.attention import Attention
from quire.layers.forward_batch import ForwardBatch
from quire.layers.group import SINGLE, Group
from quire.weight_map import Layout

# --- Probing: what each layer's attention computes ------------------------------------------------

PROBE = "quire_probe"
"""Name of the functions here in Transformers' tables of attention and mask functions."""
READ = {"scaling", "softcap", "s_aux", "sliding_window", "is_causal"}
"""Arguments of attention that are honoured; the window is read off the mask."""
HARMLESS = {"dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
"""Arguments of attention that change nothing in a forward pass with positions applied."""
STEP_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies follow the longest sequence of a call, here of a whole step."""
PROBE_LEN = 5
MAX_PROBED_POSITION = 2**20


@dataclass(frozen=True)
class ProbedLayer:
    """Attention of one module. Units: window in tokens, the query's own included; None: no window."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float | None
    window: int | None
    soft_cap: float | None


class HiddenStates(tuple[torch.Tensor]):
    """A decoder's output of hidden states alone: what heads read besides (router logits, cross attention) is None."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        """Shapes: [1, S, E]."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class GivenStates(nn.Module):
    """Stands for the decoder while the head runs: the hidden states are those that the caller gives."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> HiddenStates:
        """Shapes: inputs_embeds [1, S, E] -> the same."""
        return HiddenStates((inputs_embeds,))


def take_decoder(model: Any) -> Any:
    """Return the module below the head. Mutates: model, whose head then runs on given hidden states."""
    for name, child in model.named_children():
        if child in (model.base_model, model.get_decoder()):
            setattr(model, name, GivenStates())
            return child
    raise refused(model.config.model_type, "its head is not apart from its layers")


def make_module(hf: Any, attention: str, dtype: torch.dtype | None = None) -> Any:
    """Make Transformers' model of a config in eval mode. `attention`: the name of its attention function."""
    transformers = importlib.import_module("transformers")
    auto = transformers.AutoModelForCausalLM
    return auto.from_config(copy.deepcopy(hf), attn_implementation=attention, dtype=dtype).eval()


def read_config(hf_config: Mapping[str, Any]) -> Any:
    """Make Transformers' config. Raises: UnsupportedModelError for an encoder with a decoder."""
    transformers = importlib.import_module("transformers")
    model_type = hf_config.get("model_type")
    # Quantised weights are decoded by Quire's own reader.
    fields = {name: value for name, value in hf_config.items() if name != "quantization_config"}
    hf = transformers.CONFIG_MAPPING[model_type].from_dict(fields)
    if hf.is_encoder_decoder:
        raise refused(model_type, "it is an encoder with a decoder")
    return hf


def refused(model_type: Any, reason: str) -> UnsupportedModelError:
    """Return the error for a model whose module cannot be used."""
    return UnsupportedModelError(
        f"Transformers' own module for {model_type} models cannot be used here: {reason}. "
        "A model of your own can be added with ModelRegistry.register_model"
    )


@dataclass
class Mask:
    """The window of a mask, or why it is not one."""

    window: int | None = None
    problem: str | None = None

    def __getitem__(self, parts: tuple[Any, ...]) -> "Mask":
        """A part of the mask; all of it is the mask itself."""
        is_whole = all(isinstance(part, slice) and not part.start and part.stop is None for part in parts)
        return self if is_whole else Mask(problem="is cut")


def probe(hf: Any) -> tuple[ProbedLayer, ...]:
    """Run the module of a config on the meta device. Raises: UnsupportedModelError naming what cannot be computed."""
    transformers = importlib.import_module("transformers")
    transformers.AttentionInterface.register(PROBE, _record)
    transformers.AttentionMaskInterface.register(PROBE, describe_mask)
    with torch.device("meta"):
        model = make_module(hf, PROBE, torch.bfloat16)
        kind = type(model)
        if getattr(kind, "_is_stateful", False):
            raise refused(hf.model_type, "it keeps recurrent state")
        if not (kind._supports_sdpa or kind._supports_flash_attn or kind._supports_attention_backend):
            raise refused(hf.model_type, "its attention cannot be replaced")
        decoder = take_decoder(model)
        calls: list[tuple[Any, ProbedLayer]] = []
        for module in decoder.modules():
            module.quire_probe = (hf.model_type, calls)
            kinds = getattr(module, "rope_type", None)
            for rope_type in kinds.values() if isinstance(kinds, dict) else (kinds,):
                if rope_type in STEP_DEPENDENT_ROPE:
                    raise refused(
                        hf.model_type, f"rope_parameters has rope_type={rope_type!r}, which follows the batch"
                    )
        inputs = torch.zeros(1, PROBE_LEN, dtype=torch.long)
        # With a mask of ones Transformers does not look for several sequences in one.
        hidden = decoder(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), position_ids=inputs, use_cache=False
        )[0]
        logits = model(inputs_embeds=hidden, use_cache=False).logits
    text = hf.get_text_config()
    if tuple(logits.shape) != (1, PROBE_LEN, text.vocab_size):
        raise refused(hf.model_type, f"its logits are {list(logits.shape)}")
    names = {id(module): name for name, module in decoder.named_modules()}
    found = [replace(layer, name=names[id(module)]) for module, layer in calls]
    if len({layer.name for layer in found}) != len(found) or len(found) != text.num_hidden_layers:
        count = f"{len(found)} calls of attention in {text.num_hidden_layers} layers"
        raise refused(hf.model_type, f"not every layer has one attention that can be replaced: {count}")
    return tuple(found)


def _record(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """The attention function of the probe. Shapes: query [1, H, T, D]; key [1, K, T, D]; value [1, K, T, D']."""
    model_type, calls = module.quire_probe
    unknown = [name for name, given in options.items() if name not in READ | HARMLESS and given is not None]
    if unknown:
        raise refused(model_type, f"its attention has {', '.join(unknown)}")
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise refused(model_type, "its attention has is_causal=False")
    if hasattr(module, "sinks") and options.get("s_aux") is None:
        raise refused(model_type, "its attention has sinks that it does not pass on")
    if not isinstance(attention_mask, Mask) or attention_mask.problem:
        problem = attention_mask.problem if isinstance(attention_mask, Mask) else "is not Transformers' own"
        raise refused(model_type, f"its attention_mask {problem}")
    layer = ProbedLayer(
        "",
        query.shape[1],
        key.shape[1],
        max(query.shape[-1], value.shape[-1]),
        options.get("scaling") or query.shape[-1] ** -0.5,
        attention_mask.window,
        options.get("softcap"),
    )
    calls.append((module, layer))
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def describe_mask(*, mask_function: Callable[..., torch.Tensor], config: Any, **_: Any) -> Mask:
    """The mask function of the probe. `mask_function(0, 0, query, keys)` is true where the query sees the key."""
    last = min(config.max_position_embeddings, MAX_PROBED_POSITION) - 1
    with torch.device("cpu"):
        keys = torch.arange(last + 2)

        def seen(query: int) -> torch.Tensor:
            return mask_function(0, 0, torch.tensor(query), keys)

        try:
            count = int(seen(last).sum())
            window = None if count == last + 1 else count
            for query in {0, 1, 2, count - 1, count, count + 1, last // 3, last // 2, last - 1, last}:
                position = min(max(query, 0), last)
                expected = (keys <= position) & (keys > position - (window or last + 2))
                if not torch.equal(seen(position), expected):
                    return Mask(problem="is neither causal nor a sliding window")
        except (IndexError, RuntimeError, NotImplementedError) as error:
            return Mask(problem=f"cannot be read: {error}")
    return Mask(window)


# --- The model ------------------------------------------------------------------------------------

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
