"""`HybridLayer` and `read_recurrent_layers`: models in which some layers have recurrent state instead of attention.

Next to read: `lfm2.py`; `layers/recurrent.py`.
"""

from collections.abc import Callable
from typing import Any

from quire.errors import UnsupportedModelError
from quire.layers.forward_batch import ForwardBatch
from quire.layers.rotary import Rotation
from quire.lazy_torch import Tensor
from quire.models.hf_config import HFConfigReader
from quire.models.llama import LlamaForCausalLM, LlamaLayer

ATTENTION = ("full_attention", "attention")
RECURRENT = ("linear_attention", "mamba", "conv")
"""Hugging Face's names of layers."""


class HybridLayer(LlamaLayer):
    """Llama's, whose attention is a module with state, called with (x, batch), in recurrent layers.

    The class of that module has the checkpoint's name of it, `name_in_layer`.
    """

    def __init__(self, model: LlamaForCausalLM, config: Any, layer_index: int) -> None:
        super().__init__(model, config, layer_index)
        self.is_recurrent: bool = config.is_recurrent(layer_index)
        if self.is_recurrent:
            mixer: Any = self.self_attn
            self.recurrent_name: str = mixer.name_in_layer
            self.add_module(self.recurrent_name, mixer)
            del self.self_attn

    def attend(self, x: Tensor, rotation: Rotation | None, batch: ForwardBatch) -> Tensor:
        """Shapes: x [T, E]; rotation: cos, sin [T, C] -> [T, E]."""
        if not self.is_recurrent:
            return super().attend(x, rotation, batch)
        mixed: Tensor = getattr(self, self.recurrent_name)(self.input_layernorm(x), batch)
        return mixed


def read_recurrent_layers(
    reader: HFConfigReader, num_layers: int, is_recurrent: Callable[[int], bool], *names: str
) -> tuple[bool, ...]:
    """Read which layers have recurrent state: those that `layer_types` says, or else `is_recurrent`, by index.

    `names`: other names of the field. Raises: UnsupportedModelError for other types of layers.
    """
    found = [types for name in ("layer_types", *names) if (types := reader.strings(name, num_layers)) is not None]
    if not found:
        return tuple(map(is_recurrent, range(num_layers)))
    for layer_type in found[0]:
        if layer_type not in ATTENTION + RECURRENT:
            supported = ", ".join(ATTENTION + RECURRENT)
            raise UnsupportedModelError(f"layer type {layer_type!r} is not supported; supported are {supported}")
    return tuple(layer_type in RECURRENT for layer_type in found[0])
