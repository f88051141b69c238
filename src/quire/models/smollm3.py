"""SmolLM3: Llama in which every fourth layer has no positions, by default.

Next to read: `llama.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader, read_windows, wrong
from quire.models.hf_llama import LlamaConfig
from quire.models.llama import LlamaForCausalLM

DEFAULT_INTERVAL = 4


@dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """Llama's fields. `rotates`: for each layer whether it has positions."""

    rotates: tuple[bool, ...]
    defaults = {"tie_word_embeddings": True, "rope_theta": 2000000.0}
    unused = ("max_window_layers",)

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        num_layers = fields["num_layers"]
        rotates = _read_rotates(reader, num_layers)
        window = reader.optional_integer("sliding_window") if reader.flag("use_sliding_window", False) else None
        return fields | {
            "rotates": rotates,
            "windows": read_windows(reader, num_layers, window, lambda index: not rotates[index]),
        }


def _read_rotates(reader: HFConfigReader, num_layers: int) -> tuple[bool, ...]:
    """`no_rope_layers`, in which 0 stands for a layer without positions."""
    interval = reader.integer("no_rope_layer_interval", DEFAULT_INTERVAL)
    given = reader.raw("no_rope_layers")
    if given is None:
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not isinstance(given, list) or len(given) < num_layers or any(item not in (0, 1) for item in given):
        raise wrong("no_rope_layers", given, f"a list of {num_layers} numbers, each 0 or 1")
    return tuple(item == 1 for item in given[:num_layers])


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama with some layers without positions."""

    Config = SmolLM3Config
    config: SmolLM3Config

    def rotations(self, positions: Tensor) -> Sequence[Rotation | None]:
        rotation = self.rotary(positions)
        return [rotation if rotates else None for rotates in self.config.rotates]


ARCHITECTURES = {"SmolLM3ForCausalLM": SmolLM3ForCausalLM}
