"""Tokens from rows of logits in PyTorch: for any device, and what `native.py` must agree with.

Rows that want the same treatment are handled together; a row never pays for another row's options.
Must not know of requests that come and go. Next to read: `filters.py`, then `random.py`.
"""

from collections.abc import Sequence

import torch

from quire.sampling.filters import candidate_groups, fixed_point, is_filtered, rows_of, tempered_probabilities
from quire.sampling.logprobs import prompt_logprobs, raw_logprobs, token_logprobs
from quire.sampling.masks import ban, keep_only
from quire.sampling.nucleus import draw_from_nucleus
from quire.sampling.penalties import apply_logit_bias, apply_penalties
from quire.sampling.random import draw, uniforms
from quire.sampling.row_slices import row_slices
from quire.sampling.rows import Sampled
from quire.sampling.state import SamplingState
from quire.types import TokenLogprobs


class TorchRowSampler:
    """Chooses tokens by tensor operations. Holds nothing."""

    def add(self, state: SamplingState) -> None:
        """See `RowSampler`."""

    def remove(self, request_id: str) -> None:
        """See `RowSampler`."""

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """See `RowSampler`. Mutates: logits."""
        if all(state.is_plain_greedy for state in states):
            return [(token_id, None) for token_id in _largest(logits)]
        results: list[Sampled] = []
        for part in row_slices(*logits.shape):
            results += _sample_slice(logits[part], states[part])
        return results

    def logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
        """See `RowSampler`."""
        return prompt_logprobs(logits, token_ids, num)


def _sample_slice(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
    reported = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    raw = raw_logprobs(logits[reported]) if reported else None
    _edit(logits, states)
    token_ids = _choose(logits, states)
    results: list[Sampled] = [(token_id, None) for token_id in token_ids]
    if raw is not None:
        nums = [states[row].params.logprobs or 0 for row in reported]
        found = token_logprobs(raw, [token_ids[row] or 0 for row in reported], nums)
        for row, logprobs in zip(reported, found, strict=True):
            if token_ids[row] is not None:
                results[row] = (token_ids[row], logprobs)
    return results


def _edit(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Masks, bias and penalties, each on the rows that have it. Mutates: logits."""
    allowed = {row: kept for row, state in enumerate(states) if (kept := state.allowed) is not None}
    if allowed:
        keep_only(logits, list(allowed), list(allowed.values()))
    banned = {row: ids for row, state in enumerate(states) if (ids := state.banned_next())}
    if banned:
        ban(logits, list(banned), list(banned.values()))
    biases = {row: dict(bias) for row, state in enumerate(states) if (bias := state.params.logit_bias)}
    if biases:
        apply_logit_bias(logits, list(biases), list(biases.values()))
    counts = {row: state.counts for row, state in enumerate(states) if state.counts is not None}
    if counts:
        apply_penalties(logits, list(counts), [states[row].params for row in counts], list(counts.values()))


def _choose(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int | None]:
    """Argmax for greedy rows, a draw for the others. Mutates: logits."""
    token_ids: list[int | None] = [None] * len(states)
    greedy = [row for row, state in enumerate(states) if state.params.is_greedy]
    drawn = [row for row, state in enumerate(states) if not state.params.is_greedy]
    if greedy:
        _put(token_ids, greedy, _largest(rows_of(logits, greedy)))
    if drawn:
        _put(token_ids, drawn, _drawn(rows_of(logits, drawn), [states[row] for row in drawn]))
    return token_ids


def _put(token_ids: list[int | None], rows: Sequence[int], chosen: Sequence[int | None]) -> None:
    for row, token_id in zip(rows, chosen, strict=True):
        token_ids[row] = token_id


def _largest(logits: torch.Tensor) -> list[int | None]:
    """Lowest token id of the largest logit of each row; None where that is not finite."""
    columns = logits.argmax(dim=-1)
    # argmax points at a NaN where there is one, so that one value per row tells.
    bad = _not_finite(logits.gather(-1, columns[:, None])[:, 0])
    token_ids: list[int | None] = columns.tolist()
    _put(token_ids, bad, [None] * len(bad))
    return token_ids


def _drawn(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int | None]:
    """Draw a token for each row; None where there is no distribution. Mutates: logits."""
    params = [state.params for state in states]
    probabilities = tempered_probabilities(logits, params)
    # The softmax of a row that cannot be drawn from is NaN throughout.
    bad = _not_finite(probabilities[:, 0])
    if bad:  # something that can be drawn from, so that the other rows are handled as ever
        probabilities[bad] = torch.eye(1, logits.shape[-1], device=logits.device)
    seeds, positions = [state.seed for state in states], [state.num_tokens for state in states]
    numbers = torch.from_numpy(uniforms(seeds, positions)).to(logits.device)
    token_ids: list[int | None] = [None] * len(states)
    whole = [row for row, p in enumerate(params) if not is_filtered(p, logits.shape[-1])]
    if whole:
        _put(token_ids, whole, draw(fixed_point(rows_of(probabilities, whole)), numbers[whole]).tolist())
    filtered = [row for row, p in enumerate(params) if is_filtered(p, logits.shape[-1])]
    groups, flat = candidate_groups(probabilities, params, filtered)
    for group in groups:
        columns = draw(group.weights, numbers[group.rows])[:, None]
        _put(token_ids, group.rows, group.token_ids.gather(-1, columns)[:, 0].tolist())
    if flat:
        wanted = [params[row].top_p for row in flat]
        flat_seeds, flat_positions = [seeds[row] for row in flat], [positions[row] for row in flat]
        drawn = draw_from_nucleus(rows_of(probabilities, flat), wanted, flat_seeds, flat_positions)
        _put(token_ids, flat, drawn)
    _put(token_ids, bad, [None] * len(bad))
    return token_ids


def _not_finite(values: torch.Tensor) -> list[int]:
    """Rows whose value is NaN or infinite. Shapes: [R]."""
    return [row for row, is_good in enumerate(values.isfinite().tolist()) if not is_good]
