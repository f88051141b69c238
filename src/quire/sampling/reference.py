"""Tokens from rows of logits in plain PyTorch, by sorting: the definition that `native.py` is tested against.

    logits: allowed tokens → banned tokens → bias → penalties
    probabilities = softmax(logits / temperature), after min_p again over the tokens it left
    top_k keeps the k likeliest tokens
    top_p keeps the fewest likeliest whose probability, among those top_k left, reaches top_p

Equally likely tokens are ranked by lower token id. Probabilities become integers before they are summed: such sums are
exact, so they do not depend on the batch or the device. It also samples on GPUs.
Must not know of requests that come and go. Next to read: `random.py`, which draws.
"""

from collections.abc import Sequence

import torch

from quire.sampling.random import draw, uniforms
from quire.sampling.state import Sampled, SamplingState, position_logprobs
from quire.sampling.token_history import MAX_REPETITION, MIN_REPETITION, TokenCounts
from quire.sampling_params import ALL_LOGPROBS, SamplingParams
from quire.types import TokenLogprobs

POOL_SIZE = 128
"""If top_p alone is not decided by this many likeliest tokens, the token is drawn by `draw_from_nucleus`."""
ONE = 2**60
"""Probability 1 in fixed point. A sum over a row stays below 2**62."""
REACHED = 1.0 - 1e-6
"""Probabilities are fp32: a sum this close to top_p has reached it."""


class ReferenceRowSampler:
    """Chooses tokens by tensor operations. Holds nothing."""

    def add(self, state: SamplingState) -> None:
        """Prepare a request: nothing to do here."""

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """See `Sampler.sample`. Mutates: logits."""
        raw = {row: logits[row].clone() for row, state in enumerate(states) if state.params.logprobs is not None}
        for row, state in zip(logits, states, strict=True):
            edit_row(row, state)
        greedy = [row for row, state in enumerate(states) if state.params.is_greedy]
        drawn = [row for row, state in enumerate(states) if not state.params.is_greedy]
        chosen = dict(zip(greedy, _largest(logits[greedy]), strict=True))
        chosen |= zip(drawn, _drawn(logits[drawn], [states[row] for row in drawn]), strict=True)
        results: list[Sampled] = []
        for row, state in enumerate(states):
            token_id, num = chosen[row], state.params.logprobs
            logprobs = None
            if num is not None and token_id is not None:
                logprobs = self.logprobs(raw[row][None], [token_id], num)[0]
            results.append((token_id, logprobs))
        return results

    def logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
        """Return the log-probability of each row's token, and the `num` likeliest (-1: all).

        logprob = log_softmax(logits) in fp32;  rank = 1 + number of tokens with a larger logprob
        Shapes: logits [S, V], token_ids [S].
        """
        found = []
        for row, token_id in zip(logits, token_ids, strict=True):
            values = row.float().log_softmax(dim=-1)
            rank = int((values > values[token_id]).sum()) + 1
            top = values.sort(descending=True, stable=True)
            count = len(values) if num == ALL_LOGPROBS else num
            top_ids, top_values = top.indices[:count].tolist(), top.values[:count].tolist()
            found.append(position_logprobs(token_id, float(values[token_id]), rank, top_ids, top_values))
        return found


def edit_row(logits: torch.Tensor, state: SamplingState) -> None:
    """Apply allowed and banned tokens, bias and penalties to one row. Shapes: logits [V]. Mutates: logits."""
    allowed, banned = state.allowed, state.banned_next()
    if allowed is not None:
        kept = torch.as_tensor(allowed, device=logits.device)
        values = logits[kept]
        logits.fill_(-torch.inf)
        logits[kept] = values
    if banned:
        logits[torch.tensor(sorted(banned), device=logits.device)] = -torch.inf
    for token_id, bias in (state.params.logit_bias or {}).items():
        logits[token_id] += bias
    if state.counts is not None:
        apply_penalties(logits, state.params, state.counts)


def apply_penalties(logits: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> None:
    """Apply the three penalties to the tokens in `counts`. Shapes: logits [V]. Mutates: logits.

    repetition_penalty r:  logit / r where logit > 0, else logit * r      (CTRL, arXiv 1909.05858), prompt and output
    frequency_penalty f:   logit - f * (times generated)                  output only
    presence_penalty p:    logit - p * (1 if generated)                   output only
    """
    ids, times = (torch.from_numpy(values).to(logits.device) for values in (counts.ids, counts.counts))
    repetition = min(max(params.repetition_penalty, MIN_REPETITION), MAX_REPETITION)
    values = logits[ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[ids] = values - (params.frequency_penalty * times + params.presence_penalty * (times > 0))


def tempered_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return softmax(logits / temperature) without the tokens that min_p drops. No row may be greedy.

    A row that holds NaN or +inf, or only -inf, is NaN throughout. Shapes: [R, V] -> [R, V]. Dtypes: fp32.
    """
    logits = logits / _column([p.temperature for p in params], logits)
    probabilities = logits.softmax(dim=-1)
    ratios = _column([p.min_p for p in params], logits)
    dropped = probabilities < ratios * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(dropped, -torch.inf).softmax(dim=-1)


def rank_candidates(
    probabilities: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply top_k and top_p.

    Returns: token ids by rank, their probabilities in fixed point with 0 for tokens that are not kept, and for each row
    whether the likeliest POOL_SIZE tokens decide it.
    Shapes: probabilities [R, V] -> int64 [R, V], int64 [R, V], bool [R].
    """
    vocab_size = probabilities.shape[-1]
    values, token_ids = probabilities.sort(dim=-1, descending=True, stable=True)
    weights = fixed_point(values)
    ranks = torch.arange(vocab_size, device=values.device)
    top_k = _column([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], weights)
    weights = torch.where(ranks < top_k, weights, 0)
    # Without top_k the sum is ONE, up to rounding.
    totals = torch.where(top_k < vocab_size, weights.sum(dim=-1, keepdim=True), ONE)
    shares = [p.top_p * REACHED if p.top_p < 1 else 2.0 for p in params]
    limits = (totals * _column(shares, weights, torch.float64)).to(torch.int64)
    num_kept = ((weights.cumsum(dim=-1) < limits).sum(dim=-1, keepdim=True) + 1).clamp(max=vocab_size)
    weights = torch.where(ranks < num_kept, weights, 0)
    num_kept = (weights > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    # A last kept value that also ends the pool may occur again outside of it.
    decided = values.gather(-1, num_kept - 1) > values[:, min(POOL_SIZE, vocab_size) - 1, None]
    return token_ids, weights, (decided | (top_k < vocab_size))[:, 0] | (vocab_size <= POOL_SIZE)


def fixed_point(probabilities: torch.Tensor) -> torch.Tensor:
    """Return probabilities times ONE as int64: exact, but values below 2**-60 become 0."""
    return (probabilities * float(ONE)).to(torch.int64)


def draw_from_nucleus(weights: torch.Tensor, top_p: float, seed: int, position: int) -> int:
    """Draw from the smallest set of likeliest tokens that reaches top_p, without finding that set.

    A token is in the nucleus exactly if the tokens ranked before it hold less than top_p. Draw from all tokens and sum
    those ranked before the drawn one: if they hold less, it is a fair draw from the nucleus. Otherwise that token and
    all behind it are outside; draw again from those before it. The first attempt fails with probability at most
    1 - top_p; each failure halves what is outside, on average. The native sampler needs no sort this way.

    Shapes: weights [V], by token id. Dtypes: int64 fixed point.
    """
    limit = max(1, int(ONE * top_p * REACHED))  # at least 1, so that the best token is always inside
    ids = torch.arange(len(weights), device=weights.device)
    attempt = 0
    while True:
        number = torch.from_numpy(uniforms([seed], [position], attempt=attempt)).to(weights.device)
        token_id = draw(weights[None], number)[0]
        before = (weights > weights[token_id]) | ((weights == weights[token_id]) & (ids < token_id))
        weights = torch.where(before, weights, 0)
        if weights.sum() < limit:
            return int(token_id)
        attempt += 1


def _largest(logits: torch.Tensor) -> list[int | None]:
    """Return the lowest token id of each row's largest logit; None if that is not finite."""
    if not len(logits):
        return []
    columns = logits.argmax(dim=-1)  # points at a NaN if there is one
    finite = logits.gather(-1, columns[:, None])[:, 0].isfinite().tolist()
    return [column if is_good else None for column, is_good in zip(columns.tolist(), finite, strict=True)]


def _drawn(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[int | None]:
    """Draw a token for each row; None if there is no distribution."""
    if not states:
        return []
    params = [state.params for state in states]
    probabilities = tempered_probabilities(logits, params)
    numbers = torch.from_numpy(uniforms([s.seed for s in states], [s.num_tokens for s in states])).to(logits.device)
    token_ids, weights, decided = rank_candidates(probabilities.nan_to_num(nan=0.0), params)
    finite = probabilities[:, 0].isfinite().tolist()
    chosen: list[int | None] = []
    for row, (p, is_decided) in enumerate(zip(params, decided.tolist(), strict=True)):
        by_id = fixed_point(probabilities[row])
        if not finite[row]:
            chosen.append(None)
        elif p.top_p == 1 and not 0 < p.top_k < len(by_id):
            chosen.append(int(draw(by_id[None], numbers[row, None])[0]))
        elif is_decided:
            chosen.append(int(token_ids[row, draw(weights[row, None], numbers[row, None])[0]]))
        else:
            chosen.append(draw_from_nucleus(by_id, p.top_p, states[row].seed, states[row].num_tokens))
    return chosen


def _column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device)[:, None]
