"""`RotaryEmbedding`: positions to the cosines and sines that the `rope` kernel rotates by, once per step.

Angles are computed from the positions: a table of a 128 k context would take 128 MB. Next to read:
`kernels/rope/__init__.py` for the formula, `models/hf_config.py` for how configs are read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.kernels.tracing import Symbol

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos, sin [T, C] in fp32, as `kernels.rope` reads them."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The angles of a rotation. `kind` is Hugging Face's `rope_type`: "default", "linear" or "llama3".

    `rotated_share`: of each head's dimensions, the first ones.
    Units: original_context_len in tokens.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_len: float = 8192.0
    rotated_share: float = 1.0

    def frequencies(self, head_size: int) -> torch.Tensor:
        """Angle per position of each pair: theta^(-2i / C), then scaled, C being the dimensions rotated.

        "linear" divides all by `factor` (Chen 2023). "llama3" divides the low frequencies only: those with wavelengths
        above original_context_len / low_frequency_factor fully, those below original_context_len /
        high_frequency_factor not at all, and those between in proportion (Dubey 2024).
        Shapes: -> [C/2]. Dtypes: fp32.
        """
        rotated_size = int(head_size * self.rotated_share)
        exponents = torch.arange(0, rotated_size, 2, dtype=torch.float32, device="cpu") / rotated_size
        frequencies = 1.0 / self.theta**exponents
        if self.kind == "default":
            return frequencies
        if self.kind == "linear":
            return frequencies / self.factor
        turns = self.original_context_len * frequencies / (2 * math.pi)  # within the original context
        share = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        share = share.clamp(0.0, 1.0)
        return share * frequencies + (1 - share) * frequencies / self.factor


class RotaryEmbedding(nn.Module):
    """Cosines and sines of each position. A model with other angles passes other frequencies or overrides `forward`.

    Shapes: frequencies [C/2]; forward: positions [T] -> cos, sin [T, C].
    Dtypes: positions int64; the rest fp32, whatever type the model is cast to.
    """

    frequencies: torch.Tensor

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        self._exact_frequencies = frequencies.float()

    def forward(self, positions: torch.Tensor) -> Rotation:
        """See the class; the sign of the first half of `sin` is that of the rope kernel's contract."""
        if isinstance(positions, Symbol):
            return positions.rotation(self.frequencies)
        angles = positions.float()[:, None] * self.frequencies  # [T, C/2]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # nn.Module.to(dtype) would round the frequencies, and to_empty() lose them: only the device may change.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = self._exact_frequencies.to(self.frequencies.device)
        return self
