"""From logits to the tokens that may be drawn: temperature → min_p → top_k → top_p.

    probabilities = softmax(logits / temperature), after min_p again over what it left
    top_k keeps the k likeliest tokens
    top_p keeps the fewest likeliest whose probability, among those top_k left, reaches top_p

Equally likely tokens at an edge are kept by lower token id. The vocabulary is not sorted (117 ms for 32 rows of
49,152 on one core): a pool of a row's likeliest tokens is (4 ms for 128 of each), and nearly always decides. Rows
too flat for that are left to `nucleus.py`. Probabilities become integers before they are summed: such sums are
exact, so they do not depend on the batch, the pool or the device.
Must not know of requests or seeds. Next to read: `random.py`, which draws, then `nucleus.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.sampling.ranking import ranked_pool
from quire.sampling.row_slices import row_slices
from quire.sampling_params import SamplingParams

POOL_SIZES = (128, 1024, 8192)
"""Likeliest tokens looked at: the first for top_p, the first above top_k for top_k. Then the whole vocabulary."""
ONE = 2**60
"""Probability 1 in fixed point. A sum over a row stays below 2**62."""
REACHED = 1.0 - 1e-6
"""Probabilities are fp32: a sum this close to top_p has reached it."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be drawn in some rows of a batch, best first.

    Fields:
        rows: their rows of the batch, [r].
        token_ids: [r, C].
        weights: probabilities in fixed point, int64 [r, C]; 0 is never drawn. They need not sum to ONE.
    """

    rows: list[int]
    token_ids: torch.Tensor
    weights: torch.Tensor


def tempered_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Softmax of `logits / temperature`, without the tokens that min_p drops. No row may be greedy.

    A row that holds NaN or +inf, or only -inf, is NaN throughout.
    Shapes: logits [R, V] -> [R, V]. Dtypes: fp32. Mutates: logits.
    """
    temperatures = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=logits.device)
    logits.div_(temperatures[:, None])
    probabilities = logits.softmax(dim=-1)
    rows = [row for row, p in enumerate(params) if p.min_p > 0]
    if rows:
        selected = rows_of(probabilities, rows)
        ratios = torch.tensor([params[row].min_p for row in rows], dtype=torch.float32, device=logits.device)
        dropped = selected < ratios[:, None] * selected.amax(dim=-1, keepdim=True)
        probabilities[rows] = rows_of(logits, rows).masked_fill(dropped, -torch.inf).softmax(dim=-1)
    return probabilities


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether top_k or top_p is in effect."""
    return params.top_p < 1 or _has_top_k(params, vocab_size)


def fixed_point(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities times ONE as int64. Exact but for what lies below 2**-60, which is cut off."""
    return (probabilities * float(ONE)).to(torch.int64)


def candidate_groups(
    probabilities: torch.Tensor, params: Sequence[SamplingParams], rows: Sequence[int]
) -> tuple[list[Candidates], list[int]]:
    """Apply top_k and top_p to some rows; return groups of rows, and the rows without top_k that are too flat.

    What becomes of a row does not depend on the others.
    Shapes: probabilities [R, V]. Dtypes: fp32.
    """
    vocab_size = probabilities.shape[-1]
    groups: list[Candidates] = []
    pending = list(rows)
    for pool_size in (*POOL_SIZES, vocab_size):
        now = [row for row in pending if _may_decide(params[row], pool_size, vocab_size)]
        if not now:
            continue
        group = _decide(probabilities, now, [params[row] for row in now], pool_size)
        if group.rows:
            groups.append(group)
        decided = set(group.rows)
        pending = [row for row in pending if row not in decided]
    return groups, pending


def filtered_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the exact distribution that the sampler draws from; a greedy row is 1 at its argmax.

    `logits` are those after masks, bias and penalties. Shapes: [R, V] -> [R, V]. Dtypes: fp32 -> fp32.
    """
    filtered = torch.zeros_like(logits, dtype=torch.float32)
    for part in row_slices(*logits.shape):
        _fill_filtered(filtered[part], logits[part].float(), params[part])
    return filtered


def _fill_filtered(filtered: torch.Tensor, logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    greedy = [row for row, p in enumerate(params) if p.is_greedy]
    if greedy:
        filtered[greedy, logits[greedy].argmax(dim=-1)] = 1.0
    drawn = [row for row, p in enumerate(params) if not p.is_greedy]
    if not drawn:
        return
    drawn_params = [params[row] for row in drawn]
    probabilities = tempered_probabilities(logits[drawn], drawn_params)
    groups, flat = candidate_groups(probabilities, drawn_params, range(len(drawn)))
    if flat:
        groups.append(_decide(probabilities, flat, [drawn_params[row] for row in flat], logits.shape[-1]))
    for group in groups:
        shares = (group.weights / group.weights.sum(dim=-1, keepdim=True).double()).float()
        rows = [drawn[row] for row in group.rows]
        filtered[rows] = torch.zeros_like(filtered[rows]).scatter_(-1, group.token_ids, shares)


def _has_top_k(params: SamplingParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size


def _may_decide(params: SamplingParams, pool_size: int, vocab_size: int) -> bool:
    if _has_top_k(params, vocab_size):
        return params.top_k < pool_size or pool_size >= vocab_size
    return pool_size == POOL_SIZES[0]


def _decide(
    probabilities: torch.Tensor, rows: list[int], params: Sequence[SamplingParams], pool_size: int
) -> Candidates:
    """Candidates of those `rows` whose kept tokens are certain from the `pool_size` likeliest."""
    values, token_ids = ranked_pool(rows_of(probabilities, rows), pool_size)
    weights = fixed_point(values)
    num_kept = _num_kept(weights, params, vocab_size=probabilities.shape[-1])
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    weights = torch.where(ranks < num_kept[:, None], weights, 0)
    if weights.shape[-1] == probabilities.shape[-1]:
        return Candidates(rows, token_ids, weights)
    # A last kept value that also ends the pool may go on outside of it.
    certain = (values.gather(-1, num_kept[:, None] - 1)[:, 0] > values[:, -1]).tolist()
    if all(certain):
        return Candidates(rows, token_ids, weights)
    kept = [index for index, is_certain in enumerate(certain) if is_certain]
    return Candidates([rows[index] for index in kept], token_ids[kept], weights[kept])


def _num_kept(weights: torch.Tensor, params: Sequence[SamplingParams], *, vocab_size: int) -> torch.Tensor:
    """How many of a row's ranked tokens top_k and top_p keep; at least one.

    Shapes: weights, best first, [r, C] -> [r].
    """
    device = weights.device
    limits = torch.tensor([p.top_k if _has_top_k(p, vocab_size) else vocab_size for p in params], device=device)
    shares = torch.tensor([p.top_p * REACHED if p.top_p < 1 else 2.0 for p in params], dtype=torch.float64)
    cumulative = weights.cumsum(dim=-1)
    # Without top_k the whole is known to be ONE without looking at all of it.
    last = torch.clamp(limits, max=weights.shape[-1]) - 1
    totals = torch.where(limits < vocab_size, cumulative.gather(-1, last[:, None])[:, 0], ONE)
    reached = (cumulative < (totals * shares.to(device)).to(torch.int64)[:, None]).sum(dim=-1) + 1
    # Tokens of weight 0 cannot be drawn: counting them would only ask for larger pools.
    return torch.minimum(torch.minimum(reached, limits), (weights > 0).sum(dim=-1)).clamp_(min=1)


def rows_of(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Rows in ascending order; without a copy when they are all of them."""
    return values if len(rows) == len(values) else values[rows]
