"""`Gemma4Config`: the fields of Gemma 4's language model, read from a `config.json`.

Next to read: `gemma4_text.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from quire.cache_spec import CacheSpec, PagedKV
from quire.errors import ModelFileError, UnsupportedModelError
from quire.layers.rotary import RopeConfig
from quire.models.hf_config import FULL, SLIDING, HFConfigReader, check_divides, read_windows
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_moe import read_experts
from quire.models.hf_rope import check_pairs, make_rope, parameters_of

DEFAULTS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "sliding_window": 512, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
"""Of Gemma 4 in Transformers; configs name what differs."""
DEFAULT_PATTERN, DEFAULT_FULL_HEAD_SIZE = 6, 512
DEFAULT_ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
EXPERT_FIELDS = ("num_experts", "top_k_experts", "moe_intermediate_size")


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(LlamaConfig):
    """Llama's fields; head size, KV heads and `local_rope` are those of layers with a window.

    Fields:
        full_head_size, full_kv_heads: of layers without a window, whose values are their keys if `shares_values`.
        sources: of each layer the layer whose keys and values it attends to: its own, or an earlier one's.
        widens_mlp: MLPs of layers that attend to an earlier layer's keys are twice as wide.
        per_layer_size: values of a token that each layer has an input of its own of, 0 for none.
        per_layer_vocab: rows of their table, 0 for none.
        num_experts: of those beside each MLP, 0 for none; `sparse_layers` is empty.
        logit_cap: None for none.
    """

    full_head_size: int
    full_kv_heads: int
    shares_values: bool
    sources: tuple[int, ...]
    widens_mlp: bool
    per_layer_size: int
    per_layer_vocab: int
    logit_cap: float | None
    required = {"mlp_bias": False}

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """See `LlamaConfig.from_hf`. A field that is null has no default."""
        return super().from_hf({**DEFAULTS, **hf_config})

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        # "vision" lets the tokens of an image attend to each other; text is causal.
        reader.choice("use_bidirectional_attention", "vision", ["vision"])
        fields = super().read(reader)
        num_layers, num_heads = fields["num_layers"], fields["num_heads"]
        pattern = read_windows(
            reader, num_layers, reader.integer("sliding_window"), lambda index: (index + 1) % DEFAULT_PATTERN != 0
        )
        windows = (*pattern[:-1], None)  # Transformers gives the last layer none, whatever the config says
        shares_values = reader.flag("attention_k_eq_v", False)
        head_size, kv_heads = _read_full(reader, fields, windows, shares_values)
        check_divides("num_global_key_value_heads", kv_heads, "num_attention_heads", num_heads)
        local = _read_rope(reader, SLIDING)
        check_pairs(local, fields["head_size"])
        check_pairs(fields["rope"], head_size)
        cap, size = (
            reader.raw("final_logit_softcapping"),
            reader.optional_integer("hidden_size_per_layer_input", minimum=0),
        )
        per_layer_vocab = reader.integer("vocab_size_per_layer_input")
        if size and per_layer_vocab < fields["vocab_size"]:
            raise UnsupportedModelError(
                f"the model's config has vocab_size_per_layer_input={per_layer_vocab}, less than vocab_size="
                f"{fields['vocab_size']}: tokens without an input of each layer are not supported"
            )
        return (
            fields
            | _read_experts(reader, fields)
            | {
                "windows": windows,
                "local_rope": local,
                "score_scale": 1.0,
                "full_head_size": head_size,
                "full_kv_heads": kv_heads,
                "shares_values": shares_values,
                "sources": _read_sources(reader, windows),
                "widens_mlp": reader.flag("use_double_wide_mlp", False),
                "per_layer_size": size or 0,
                "per_layer_vocab": per_layer_vocab if size else 0,
                "logit_cap": None if cap is None else reader.number("final_logit_softcapping", 0.0),
            }
        )

    @classmethod
    def read_rope(cls, reader: HFConfigReader) -> RopeConfig:
        """Read the angles of layers without a window."""
        return _read_rope(reader, FULL)

    @classmethod
    def check_activation(cls, reader: HFConfigReader) -> None:
        reader.choice("hidden_activation", "gelu_pytorch_tanh", ["gelu_pytorch_tanh"])

    def of_layer(self, index: int) -> Self:
        """Return the config with the head size, KV heads and MLP columns of one layer."""
        doubles = self.widens_mlp and self.sources[index] != index
        width = self.intermediate_size * (2 if doubles else 1)
        if self.windows[index] is not None:
            return replace(self, intermediate_size=width)
        return replace(self, intermediate_size=width, head_size=self.full_head_size, num_kv_heads=self.full_kv_heads)

    def kv_specs(self) -> list[CacheSpec]:
        """See `LlamaConfig.kv_specs`: only of layers with keys of their own, which come first."""
        layers = [self.of_layer(index) for index, source in enumerate(self.sources) if index == source]
        sizes = [(layer.num_kv_heads, layer.head_size) for layer in layers]
        return [PagedKV(*size, 1, window) for size, window in zip(sizes, self.windows[: len(sizes)], strict=True)]


def _read_full(
    reader: HFConfigReader, fields: Mapping[str, Any], windows: Sequence[int | None], shares_values: bool
) -> tuple[int, int]:
    """Read head size and KV heads of layers without a window, in `per_layer_config` since Transformers 5.

    Raises: UnsupportedModelError if it has other layers, or sizes that are not the same in all of them.
    """
    values = {"head_dim": reader.integer("global_head_dim", DEFAULT_FULL_HEAD_SIZE)}
    kv_heads, found = reader.optional_integer("num_global_key_value_heads"), reader.raw("per_layer_config")
    if shares_values and kv_heads is not None:
        values["num_key_value_heads"] = kv_heads
    if found is not None:
        full = [str(index) for index, window in enumerate(windows) if window is None]
        each: list[Any] = (
            [found.get(index, found.get(int(index))) for index in full] if isinstance(found, dict) else [None]
        )
        is_known = all(isinstance(value, Mapping) and value == each[0] for value in each)
        if not is_known or len(found) != len(full) or each[0].keys() - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(
                f"the model's config has per_layer_config={str(found)[:80]}; supported are head_dim and"
                " num_key_value_heads, the same for all layers of full attention and for no others"
            )
        values = each[0]
    sizes = HFConfigReader(values)
    return sizes.integer("head_dim", fields["head_size"]), sizes.integer("num_key_value_heads", fields["num_kv_heads"])


def _read_sources(reader: HFConfigReader, windows: Sequence[int | None]) -> tuple[int, ...]:
    """Read of each layer the layer whose keys and values it attends to: for the last ones the last own of their kind.

    Raises: ModelFileError if there is none.
    """
    num_shared = reader.optional_integer("num_kv_shared_layers", minimum=0) or 0
    num_own = len(windows) - num_shared
    last = {window: index for index, window in enumerate(windows[: max(num_own, 0)])}
    if any(window not in last for window in windows):
        raise ModelFileError(
            f"the model's config has num_kv_shared_layers={num_shared}: of {len(windows)} layers, the first"
            f" {max(num_own, 0)} must have one of each of the layer_types"
        )
    return tuple(index if index < num_own else last[window] for index, window in enumerate(windows))


def _read_rope(reader: HFConfigReader, layer_type: str) -> RopeConfig:
    values = parameters_of(reader, "rope_parameters", layer_type) or DEFAULT_ROPE[layer_type]
    return make_rope(reader, {"rope_theta": DEFAULT_ROPE[layer_type]["rope_theta"], **values})


def _read_experts(reader: HFConfigReader, fields: Mapping[str, Any]) -> dict[str, Any]:
    if not reader.flag("enable_moe_block", False):
        for name in EXPERT_FIELDS:
            reader.raw(name)
        return {"top_k": 0}
    experts = read_experts(reader, fields, EXPERT_FIELDS[:1], EXPERT_FIELDS[1])
    return experts | {"expert_size": reader.integer("moe_intermediate_size"), "sparse_layers": ()}
