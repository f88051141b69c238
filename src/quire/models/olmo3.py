"""OLMo 3: OLMo 2 with a window in three of four layers, whose angles are not scaled.

Next to read: `olmo2.py`.
"""

from dataclasses import dataclass
from typing import Any

from quire.layers.rotary import RopeConfig
from quire.models.hf_config import FULL, SLIDING, HFConfigReader, read_window, read_windows
from quire.models.hf_rope import read_rope_of_type
from quire.models.olmo2 import OLMo2Config, OLMo2ForCausalLM

DEFAULT_WINDOW = 4096
DEFAULT_THETA = 500000.0


@dataclass(frozen=True, kw_only=True)
class OLMo3Config(OLMo2Config):
    """OLMo 2's fields, with windows and two kinds of angles."""

    @classmethod
    def read(cls, reader: HFConfigReader) -> dict[str, Any]:
        fields = super().read(reader)
        window = read_window(reader, DEFAULT_WINDOW)
        return fields | {
            "local_rope": read_rope_of_type(reader, SLIDING, theta=DEFAULT_THETA),
            "windows": read_windows(reader, fields["num_layers"], window, lambda index: (index + 1) % 4 != 0),
        }

    @classmethod
    def read_rope(cls, reader: HFConfigReader) -> RopeConfig:
        """Read the angles of layers without a window."""
        return read_rope_of_type(reader, FULL, theta=DEFAULT_THETA)


class OLMo3ForCausalLM(OLMo2ForCausalLM):
    """OLMo 2 with windows."""

    Config = OLMo3Config


ARCHITECTURES = {"Olmo3ForCausalLM": OLMo3ForCausalLM}
