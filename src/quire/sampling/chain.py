"""Tokens from rows of logits in the order of llama.cpp's samplers, in NumPy, one row at a time.

    logits: allowed tokens → banned tokens → bias → penalties → DRY
    temperature 0: the largest logit
    mirostat 2: temperature → tokens of at most mu bits of surprise → draw
    else `STEPS`, each on the tokens that the one before left: top_n_sigma → top_k → typical_p → top_p → min_p → XTC
    → temperature, dynamic or not → draw

Only requests that set one of `LLAMA_CPP_FIELDS` come here; other rows are the row sampler's, which applies the
temperature first. Everything is fp64, sums of weights are sums of integers, and of equally good tokens the lower ids
stay, so that a row's token depends on nothing but its logits, its request and its position.
Must not know of batches. Next to read: `random.py` for the numbers, `token_history.py` for DRY's repetitions.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.sampling.random import uniforms
from quire.sampling.state import SamplingState
from quire.sampling.token_history import MAX_REPETITION, MIN_REPETITION
from quire.sampling_params import GREEDY_BELOW, SamplingParams

Values = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
ONE = 2**60
"""Probability 1 in fixed point."""
POOL_SIZE = 1024
"""Tokens that are sorted first: mostly they decide what a step keeps."""
REACHED = 1.0 - 1e-9
"""A sum of probabilities this close to its limit has reached it."""
XTC_ATTEMPT = 2**31
"""Number of XTC's draw at a position, beside those of the token's."""
MAX_LOG = math.log(float(np.finfo(np.float32).max))
"""DRY's penalty grows with a repetition up to about e to this power, as in llama.cpp."""


def choose(logits: npt.NDArray[np.float32], state: SamplingState) -> int | None:
    """Return the next token; None if the logits leave no choice. Shapes: logits [V]. Mutates: logits, and the next mu.

    The caller appends the token to `state`, or asks again: until then the answer stays the same.
    """
    edit_row(logits, state)
    values = logits.astype(np.float64)
    penalise_repeats(values, state)
    best = int(values.argmax())  # points at a NaN if there is one
    if not math.isfinite(values[best]):
        return None
    params = state.params
    if params.is_greedy:
        return best
    ids = np.flatnonzero(values > -np.inf)
    values = values[ids]
    if params.mirostat:
        return _draw_by_mirostat(ids, values / params.temperature, state)
    for step in STEPS:
        kept = step(values, state)
        if kept is not None:
            ids, values = ids[kept], values[kept]
    return int(ids[_draw(fixed_point(values / temperature(values, params)), state)])


def edit_row(logits: npt.NDArray[np.float32], state: SamplingState) -> None:
    """Apply allowed and banned tokens, bias and penalties, as `reference.edit_row`. Shapes: [V]. Mutates: logits."""
    allowed, banned = state.allowed, state.banned_next()
    if allowed is not None:
        values = logits[allowed]
        logits.fill(-np.inf)
        logits[allowed] = values
    logits[sorted(banned)] = -np.inf
    params = state.params
    for token_id, bias in (params.logit_bias or {}).items():
        logits[token_id] += bias
    if state.counts is not None:
        ids, times = state.counts.ids, state.counts.counts
        repetition = np.float32(min(max(params.repetition_penalty, MIN_REPETITION), MAX_REPETITION))
        values = logits[ids]
        values = np.where(values > 0, values / repetition, values * repetition)
        logits[ids] = values - (params.frequency_penalty * times + params.presence_penalty * (times > 0))


def penalise_repeats(logits: Values, state: SamplingState) -> None:
    """Apply DRY: logit - multiplier * base ** (length - allowed_length) for tokens that continue a repetition.

    By p-e-w ("DRY: A modern repetition penalty", text-generation-webui 5677). Shapes: [V]. Mutates: logits.
    """
    if state.repeats is None:
        return
    params = state.params
    ids, lengths = state.repeats.continuations(params.dry_allowed_length)
    most = MAX_LOG / math.log(params.dry_base) if params.dry_base > 1 else math.inf
    grown = np.minimum(lengths - params.dry_allowed_length, most)
    logits[ids] -= params.dry_multiplier * params.dry_base**grown


# --- Steps: which of the tokens that are left stay; None: all --------------------------------------


def top_n_sigma(logits: Values, state: SamplingState) -> Mask | None:
    """Keep logit >= max - n * standard deviation (Tang et al., "Top-nσ: Not all logits are you need", 2024)."""
    n = state.params.top_n_sigma
    return None if n <= 0 else logits >= logits.max() - n * logits.std()


def top_k(logits: Values, state: SamplingState) -> Mask | None:
    """Keep the k largest logits."""
    k = state.params.top_k
    if not 0 < k < len(logits):
        return None
    return _keep_least(-logits, np.ones(len(logits), np.int64), k)


def typical_p(logits: Values, state: SamplingState) -> Mask | None:
    """Keep the fewest tokens of least |-log p - entropy| that together reach typical_p (Meister et al., 2022)."""
    mass = state.params.typical_p
    if mass >= 1:
        return None
    surprise = _surprise(logits)
    probabilities = np.exp(-surprise)
    weights = (probabilities * float(ONE)).astype(np.int64)
    distances = np.abs(surprise - float((probabilities * surprise).sum()))
    return _keep_least(distances, weights, _limit(weights, mass))


def top_p(logits: Values, state: SamplingState) -> Mask | None:
    """Keep the fewest likeliest tokens that together reach top_p (Holtzman et al., 2020)."""
    mass = state.params.top_p
    if mass >= 1:
        return None
    weights = fixed_point(logits)
    return _keep_least(-logits, weights, _limit(weights, mass))


def min_p(logits: Values, state: SamplingState) -> Mask | None:
    """Keep p >= min_p * the largest p (Nguyen et al., 2024)."""
    share = state.params.min_p
    return None if share <= 0 else logits >= logits.max() + math.log(share)


def xtc(logits: Values, state: SamplingState) -> Mask | None:
    """With xtc_probability drop the tokens of p >= xtc_threshold but the least likely of them.

    By p-e-w ("Exclude Top Choices", text-generation-webui 6335).
    """
    params = state.params
    if params.xtc_probability <= 0 or _number(state, XTC_ATTEMPT) >= params.xtc_probability:
        return None
    above = np.exp(-_surprise(logits)) >= params.xtc_threshold
    if above.sum() < 2:
        return None
    kept = ~above
    # Of equally likely ones the one ranked last, that of the largest id.
    kept[np.flatnonzero(above & (logits == logits[above].min()))[-1]] = True
    return kept


STEPS: tuple[Callable[[Values, SamplingState], Mask | None], ...] = (top_n_sigma, top_k, typical_p, top_p, min_p, xtc)


def temperature(logits: Values, params: SamplingParams) -> float:
    """Return the temperature: temperature ± dynatemp_range, by the entropy's share of that of equal probabilities.

    low + (high - low) * (entropy / log n) ** exponent, with low at least 0
    """
    if params.dynatemp_range <= 0 or len(logits) < 2:
        return params.temperature
    low, high = max(0.0, params.temperature - params.dynatemp_range), params.temperature + params.dynatemp_range
    surprise = _surprise(logits)
    share = float((np.exp(-surprise) * surprise).sum()) / math.log(len(logits))
    raised: float = share**params.dynatemp_exponent
    return max(GREEDY_BELOW, low + (high - low) * raised)


def _draw_by_mirostat(ids: npt.NDArray[np.int64], logits: Values, state: SamplingState) -> int:
    """Draw from the tokens of at most mu bits of surprise, and correct mu (Basu et al., 2021, Algorithm 2).

    mu' = mu - eta * (surprise of the drawn token among those - tau). Mutates: state.next_mirostat_mu.
    """
    params, mu = state.params, state.mirostat_mu
    assert mu is not None
    kept = _surprise(logits) / math.log(2) <= mu
    if not kept.any():
        kept[logits.argmax()] = True
    ids, logits = ids[kept], logits[kept]
    drawn = _draw(fixed_point(logits), state)
    observed = float(_surprise(logits)[drawn]) / math.log(2)
    state.next_mirostat_mu = mu - params.mirostat_eta * (observed - params.mirostat_tau)
    return int(ids[drawn])


# --- Arithmetic ------------------------------------------------------------------------------------


def fixed_point(logits: Values) -> npt.NDArray[np.int64]:
    """Return softmax(logits) times ONE: exact to sum, but values below 2**-60 become 0. Shapes: [C] -> [C]."""
    shares = np.exp(logits - logits.max())
    return np.asarray(shares * (ONE / shares.sum()), np.float64).astype(np.int64)


def _surprise(logits: Values) -> Values:
    """Return -log softmax(logits), in nats. Shapes: [C] -> [C]."""
    below = logits - logits.max()
    return np.asarray(math.log(np.exp(below).sum()) - below, np.float64)


def _limit(weights: npt.NDArray[np.int64], mass: float) -> int:
    return max(1, int(int(weights.sum()) * mass * REACHED))


def _keep_least(keys: Values, weights: npt.NDArray[np.int64], limit: int) -> Mask:
    """Return the fewest elements, those of the smallest keys first, whose weights reach `limit`. Shapes: [C]."""
    size, best = min(POOL_SIZE, len(keys)), np.arange(len(keys))
    if size < len(keys):
        best = np.argpartition(keys, size)[:size]
        if weights[best].sum() < limit:
            best = np.arange(len(keys))
    best = best[np.argsort(keys[best])]
    reached = int(np.searchsorted(np.cumsum(weights[best]), limit))
    last = keys[best[min(reached, len(best) - 1)]]
    kept: Mask = keys < last
    # Sorting leaves the order of equal keys open: of these the first ids are kept.
    equal = np.flatnonzero(keys == last)
    num = int(np.searchsorted(np.cumsum(weights[equal]), limit - int(weights[kept].sum()))) + 1
    kept[equal[:num]] = True
    return kept


def _draw(weights: npt.NDArray[np.int64], state: SamplingState) -> int:
    """Return a place with probability proportional to its weight. Shapes: [C]."""
    cumulative = np.cumsum(weights)
    target = int(_number(state, 0) * int(cumulative[-1]))
    return int(np.searchsorted(cumulative, target, side="right"))


def _number(state: SamplingState, attempt: int) -> float:
    return float(uniforms([state.seed], [state.num_tokens], attempt=attempt)[0])


def as_row(logits: Any) -> npt.NDArray[np.float32]:
    """Return a copy of a row of logits, an array or a tensor on any device, in the host's memory. Shapes: [V]."""
    values = logits if isinstance(logits, np.ndarray) else logits.cpu().numpy()
    return np.array(values, np.float32)
