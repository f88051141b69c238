"""Log-probabilities as reported: of the model's own logits, before masks, penalties and temperature.

    logprob = log_softmax(logits) in fp32;  rank = 1 + number of tokens with a larger logprob

Next to read: `types.TokenLogprobs`.
"""

from collections.abc import Sequence

import torch

from quire.sampling.ranking import top_columns
from quire.sampling.row_slices import row_slices
from quire.sampling_params import ALL_LOGPROBS
from quire.types import TokenLogprobs


def raw_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """fp32 log-softmax. Shapes: [R, V] -> [R, V]."""
    return logits.float().log_softmax(dim=-1)


def prompt_logprobs(logits: torch.Tensor, next_token_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
    """Log-probability of each next prompt token, and the `num` likeliest (-1: all), a slice of rows at a time.

    Shapes: logits [S, V], next_token_ids [S]. Dtypes: any float.
    """
    positions: list[TokenLogprobs] = []
    for part in row_slices(*logits.shape):
        token_ids = list(next_token_ids[part])
        positions += token_logprobs(raw_logprobs(logits[part]), token_ids, [num] * len(token_ids))
    return positions


def token_logprobs(logprobs: torch.Tensor, token_ids: Sequence[int], nums: Sequence[int]) -> list[TokenLogprobs]:
    """Each row's token first, then its `num` likeliest (-1: all), best first, without repeating the token.

    Shapes: logprobs [R, V], token_ids [R], nums [R]. Dtypes: fp32.
    """
    index = torch.tensor(token_ids, device=logprobs.device)[:, None]
    own = logprobs.gather(-1, index)
    ranks = ((logprobs > own).sum(dim=-1) + 1).tolist()
    own_values = own[:, 0].tolist()
    top = _top_by_row(logprobs, nums)
    return [
        position_logprobs(token_ids[row], own_values[row], ranks[row], *top.get(row, ((), ())))
        for row in range(len(token_ids))
    ]


def _top_by_row(logprobs: torch.Tensor, nums: Sequence[int]) -> dict[int, tuple[list[int], list[float]]]:
    """Token ids and logprobs of the likeliest of each row that asks for some; rows that ask for as many together."""
    rows_by_num: dict[int, list[int]] = {}
    for row, num in enumerate(nums):
        if num != 0:
            count = logprobs.shape[-1] if num == ALL_LOGPROBS else min(num, logprobs.shape[-1])
            rows_by_num.setdefault(count, []).append(row)
    top: dict[int, tuple[list[int], list[float]]] = {}
    for count, rows in rows_by_num.items():
        values, columns = top_columns(logprobs if len(rows) == len(logprobs) else logprobs[rows], count)
        top.update(zip(rows, zip(columns.tolist(), values.tolist(), strict=True), strict=True))
    return top


def position_logprobs(
    token_id: int, logprob: float, rank: int, top_ids: Sequence[int], top_values: Sequence[float]
) -> TokenLogprobs:
    """One token and the likeliest, best first, without repeating it; equal ones have the same rank."""
    ids, values, ranks = [token_id], [logprob], [rank]
    top_rank = 1
    for place, (top_id, top_value) in enumerate(zip(top_ids, top_values, strict=True)):
        if place and top_value < top_values[place - 1]:
            top_rank = place + 1
        if top_id != token_id:
            ids.append(top_id)
            values.append(top_value)
            ranks.append(top_rank)
    return TokenLogprobs(tuple(ids), tuple(values), tuple(ranks))
