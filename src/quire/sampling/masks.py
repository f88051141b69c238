"""Tokens that must not be generated: structured_outputs, allowed_token_ids, bad_words, min_tokens.

`structured_outputs` and `allowed_token_ids` always hold. bad_words and min_tokens give way together for one step when
they would leave no token at all (all allowed tokens are end tokens and min_tokens is not reached, say): the request
goes on with what is allowed rather than fail or generate what is not.
Next to read: `penalties.py`, which comes after the masks.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch


class BadWords:
    """Token sequences that must not be completed in the generated text; the prompt does not count."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._single: set[int] = set()
        self._endings: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for sequence in sequences:
            *before, last = sequence
            if before:
                # Keyed by the token just before the last: a step compares only what can match.
                self._endings.setdefault(before[-1], []).append((tuple(before), last))
            else:
                self._single.add(last)

    def banned_next(self, output_ids: Sequence[int]) -> set[int]:
        """Tokens that would complete a sequence after `output_ids`."""
        banned = set(self._single)
        if output_ids:
            for before, last in self._endings.get(output_ids[-1], ()):
                if tuple(output_ids[-len(before) :]) == before:
                    banned.add(last)
        return banned


def leaves_a_token(banned: set[int], allowed: Sequence[int] | npt.NDArray[np.int64] | None, vocab_size: int) -> bool:
    """Whether some allowed token (None: any of the vocabulary) is not banned."""
    if allowed is None:
        return len(banned) < vocab_size
    # One token more than are banned tells.
    return any(token_id not in banned for token_id in allowed[: len(banned) + 1])


def keep_only(
    logits: torch.Tensor, rows: Sequence[int], allowed: Sequence[Sequence[int] | npt.NDArray[np.int64]]
) -> None:
    """Set all logits of `rows` to -inf except those allowed. Shapes: logits [R, V]. Mutates: logits."""
    for row, token_ids in zip(rows, allowed, strict=True):
        index = torch.as_tensor(token_ids, device=logits.device)
        kept = logits[row, index]
        logits[row].fill_(-torch.inf)
        logits[row, index] = kept


def ban(logits: torch.Tensor, rows: Sequence[int], banned: Sequence[set[int]]) -> None:
    """Set the banned logits of each row to -inf. Shapes: logits [R, V]. Mutates: logits."""
    row_of_token = [row for row, token_ids in zip(rows, banned, strict=True) for _ in token_ids]
    flat = [token_id for token_ids in banned for token_id in token_ids]
    if flat:
        places = torch.tensor([row_of_token, flat], device=logits.device)
        logits[places[0], places[1]] = -torch.inf
