"""`RotaryEmbedding`: positions to the cosines and sines that the `rope` kernel rotates by, once per step.

Angles are computed from the positions: a table of a 128 k context would take 128 MB. Next to read:
`kernels/rope.py` for the formula, `models/hf_rope.py` for how configs are read.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import nn
from quire.kernels.tracing import Symbol
from quire.lazy_torch import Tensor, is_tensor, torch

Rotation = tuple[Tensor, Tensor]
"""cos, sin [T, C] in fp32, as `kernels.rope` reads them."""
CHOSEN_BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose frequencies depend on the length of the longest sequence, `RopeConfig.max_len`."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The angles of a rotation. `kind` is Hugging Face's `rope_type`; see `frequencies` for the formulas.

    `rotated_share`: of each head's dimensions, the first ones. `attention_factor`: factor of cosines and sines.
    `fast_turns`, `slow_turns`, `truncates`: YaRN's beta_fast, beta_slow and truncate. `short_factors`, `long_factors`:
    LongRoPE's divisors, one per frequency.

    Transformers chooses the frequencies of `CHOSEN_BY_LENGTH` for each forward by the tokens in it, so that keys in a
    cache may have been rotated by others than the queries. Here they are chosen once for all sequences, by `max_len`,
    the engine's `max_model_len`: "longrope" takes the short factors if `max_len` is at most `original_context_len`,
    else the long ones, as vLLM does; "dynamic" takes those of a sequence of `max_len` tokens. Results equal
    Transformers' for sequences on the same side of `original_context_len` (longrope), and for sequences of `max_len`
    tokens or a `max_len` of at most `original_context_len` (dynamic).
    Units: original_context_len, max_len in tokens.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_len: float = 8192.0
    rotated_share: float = 1.0
    attention_factor: float = 1.0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncates: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    max_len: float = 0.0

    def for_length(self, max_len: int) -> "RopeConfig":
        """Return the angles for sequences of at most `max_len` tokens."""
        return replace(self, max_len=float(max_len)) if self.kind in CHOSEN_BY_LENGTH else self

    def stretched(self, context_len: int) -> int:
        """Return the tokens that the angles are made for, `context_len` being `max_position_embeddings`."""
        factor = self.factor if self.kind in ("yarn", "dynamic") else 0.0
        return max(context_len, int(factor * self.original_context_len))

    def rotated_size(self, head_size: int) -> int:
        """C: the dimensions of a head that are rotated, by angle 0 too."""
        return head_size if self.kind == "proportional" else int(head_size * self.rotated_share)

    def frequencies(self, head_size: int) -> NDArray[Any]:
        """Angle per position of each pair: theta^(-2i / C), then scaled, C being the dimensions rotated.

        "linear" divides all by `factor` (Chen 2023). "llama3" divides the low frequencies only: those with wavelengths
        above original_context_len / low_frequency_factor fully, those below original_context_len /
        high_frequency_factor not at all, and those between in proportion (Dubey 2024). "yarn" divides fully those of
        fewer than `slow_turns` turns in the original context, not at all those of more than `fast_turns`, and those
        between in proportion to i (Peng 2023). "dynamic" stretches theta so that the lowest frequency is divided by
        factor · max_len / original_context_len - (factor - 1) (Peng 2023, sec. 3.3). "longrope" divides each by its
        own factor (Ding 2024). "proportional" divides all by `factor`, and those behind the first `rotated_share` are 0
        (Gemma 4).
        Shapes: -> [C/2]. Dtypes: fp32.
        """
        size = self.rotated_size(head_size)
        theta = self._stretched_theta(size) if self.kind == "dynamic" else self.theta
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        # In fp64 first, as all such values: powers of fp32 are some units off in NumPy's code for AVX-512, which at
        # position 100,000 turns an angle by 5 milliradians.
        periods: NDArray[Any] = (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)
        if self.kind == "longrope":
            factors = self.long_factors if self.max_len > self.original_context_len else self.short_factors
            periods *= np.array(factors, np.float32)
            return 1 / periods
        frequencies: NDArray[Any] = 1 / periods
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "proportional":
            frequencies[int(self.rotated_share * head_size // 2) :] = 0.0
            return frequencies / self.factor
        if self.kind == "llama3":
            turns = self.original_context_len * frequencies / (2 * math.pi)  # within the original context
            share = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
            share = share.clip(0.0, 1.0)
            softened: NDArray[Any] = share * frequencies + (1 - share) * frequencies / self.factor
            return softened
        if self.kind == "yarn":
            share = 1 - self._yarn_ramp(size)
            stretched: NDArray[Any] = 1.0 / (self.factor * periods) * (1 - share) + frequencies * share
            return stretched
        return frequencies

    def _stretched_theta(self, size: int) -> float:
        if size <= 2:
            return self.theta  # the one frequency is 1
        original = self.original_context_len
        stretch = self.factor * max(self.max_len, original) / original - (self.factor - 1)
        return float(self.theta * stretch ** (size / (size - 2)))

    def _yarn_ramp(self, size: int) -> NDArray[Any]:
        """0 for frequencies that are kept, 1 for those that are divided. Shapes: -> [C/2]."""

        def index_of(turns: float) -> float:
            return size * math.log(self.original_context_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = index_of(self.fast_turns), index_of(self.slow_turns)
        if self.truncates:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low or 0.001
        ramp: NDArray[Any] = (np.arange(size // 2, dtype=np.float32) - low) / width
        return ramp.clip(0.0, 1.0)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of each position. A model with other angles passes other frequencies or overrides `forward`.

    Both are multiplied by scales[position // period], the last of them past their end; without `scales` by 1.
    Shapes: frequencies [C/2]; scales [any number]; forward: positions [T] -> cos, sin [T, C].
    Dtypes: positions int64; the rest fp32, whatever type the model has.
    """

    def __init__(self, frequencies: Any, scales: Any = None, period: int = 1) -> None:
        self.frequencies, self.scales, self.period = _values(frequencies), _values(scales), period
        self._on_devices: dict[Any, tuple[Tensor, Tensor | None]] = {}

    @classmethod
    def of(cls, config: RopeConfig, head_size: int) -> "RotaryEmbedding":
        """Make the angles of a config."""
        factor = config.attention_factor
        return cls(config.frequencies(head_size), None if factor == 1.0 else [factor])

    def forward(self, positions: Tensor) -> Rotation:
        """See the class; the sign of the first half of `sin` is that of the rope kernel's contract."""
        if isinstance(positions, Symbol):
            return positions.rotation(self.frequencies, self.scales, self.period)
        if positions.device not in self._on_devices:
            values = [None if array is None else torch.from_numpy(array) for array in (self.frequencies, self.scales)]
            on_device = [None if tensor is None else tensor.to(positions.device) for tensor in values]
            self._on_devices[positions.device] = on_device[0], on_device[1]  # type: ignore[assignment]
        frequencies, scales = self._on_devices[positions.device]
        angles = positions.float()[:, None] * frequencies  # [T, C/2]
        cos, sin = angles.cos(), angles.sin()
        if scales is not None:
            factors = scales[(positions // self.period).clamp(max=len(scales) - 1)][:, None]  # [T, 1]
            cos, sin = cos * factors, sin * factors
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _values(values: Any) -> Any:
    """Return fp32 values of an array or a tensor; a tensor on "meta", which has none, as it is."""
    if is_tensor(values):
        return values if values.is_meta else values.detach().float().cpu().numpy()
    return None if values is None else np.asarray(values, np.float32)
