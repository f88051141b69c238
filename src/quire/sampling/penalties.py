"""Logit bias and the repetition, frequency and presence penalties: what changes single logits.

    repetition_penalty r:  logit / r where logit > 0, else logit * r      (CTRL, arXiv 1909.05858), prompt and output
    frequency_penalty f:   logit - f * (times generated)                  output only
    presence_penalty p:    logit - p * (1 if generated)                   output only

Counts grow with each token and are never rebuilt. All rows are changed by one gather and one scatter.
Next to read: `masks.py`, which forbids tokens.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.sampling_params import SamplingParams

MIN_REPETITION, MAX_REPETITION = 1e-30, 1e30
"""Repetition penalties are clipped to these: beyond, fp32 logits would become infinite, or NaN at 0."""
_INITIAL_CAPACITY = 64


class TokenCounts:
    """The distinct tokens of one request and how often each was generated, as growing arrays.

    `ids`: int64 [U] and `counts`: fp32 [U], in the order of first appearance; a token of the prompt that was
    not generated yet counts 0.
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        distinct = list(dict.fromkeys(prompt_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        capacity = max(_INITIAL_CAPACITY, 2 * len(distinct))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._find_addresses()

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, token_id: int) -> None:
        """Count one generated token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._find_addresses()
        self._ids[slot] = token_id
        self._counts[slot] += 1

    def _find_addresses(self) -> None:
        # Asking numpy for an address takes longer than all else of a step.
        self.addresses = (self._ids.ctypes.data, self._counts.ctypes.data)
        """Of `ids` and of `counts`, until the next `add`."""

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct token ids [U]."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Times each was generated [U]."""
        return self._counts[: len(self._slots)]


def apply_logit_bias(logits: torch.Tensor, rows: Sequence[int], biases: Sequence[dict[int, float]]) -> None:
    """Add each row's biases to its logits. Shapes: logits [R, V]. Mutates: logits."""
    lengths = [len(bias) for bias in biases]
    token_ids = [token_id for bias in biases for token_id in bias]
    values = [value for bias in biases for value in bias.values()]
    places = _places(rows, lengths, np.array(token_ids, dtype=np.int64), logits.device)
    logits[places] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def apply_penalties(
    logits: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams], counts: Sequence[TokenCounts]
) -> None:
    """Repetition, then frequency and presence penalties. Shapes: logits [R, V]. Mutates: logits."""
    lengths = [len(count.ids) for count in counts]
    if not any(lengths):
        return
    places = _places(rows, lengths, np.concatenate([count.ids for count in counts]), logits.device)
    times = np.concatenate([count.counts for count in counts])

    def per_token(values: list[float]) -> npt.NDArray[np.float32]:
        return np.repeat(np.array(values, dtype=np.float32), lengths)

    subtracted = per_token([p.frequency_penalty for p in params]) * times
    subtracted += per_token([p.presence_penalty for p in params]) * (times > 0)
    factors = [min(max(p.repetition_penalty, MIN_REPETITION), MAX_REPETITION) for p in params]
    repetition = torch.from_numpy(per_token(factors)).to(logits.device)
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[places] = values - torch.from_numpy(subtracted).to(logits.device)


def _places(
    rows: Sequence[int], lengths: Sequence[int], token_ids: npt.NDArray[np.int64], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of `token_ids`, which are `lengths[i]` for each `rows[i]`, into [R, V]."""
    row_of_token = np.repeat(np.array(rows, dtype=np.int64), lengths)
    return torch.from_numpy(row_of_token).to(device), torch.from_numpy(token_ids).to(device)
