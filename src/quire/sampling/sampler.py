"""Logits to tokens, for a batch in which every row may want something else.

    raw logprobs → allowed_token_ids → bad_words, min_tokens → logit_bias → repetition, frequency, presence penalties
    → greedy: argmax | else temperature → min_p → top_k → top_p → draw by (seed, position)

Rows that want the same treatment are handled together; a row never pays for another row's options, and its token
does not depend on the other rows. Must not know of blocks, schedules or the model. What a request says about
tokens (ids below the vocabulary size) was checked when it was added to the engine.
Next to read: `filters.py`, then `random.py`.
"""

from collections.abc import Sequence

import torch

from quire.sampling.filters import candidate_groups, fixed_point, is_filtered, rows_of, tempered_probabilities
from quire.sampling.logprobs import prompt_logprobs, raw_logprobs, token_logprobs
from quire.sampling.masks import BadWords, ban, keep_only, leaves_a_token
from quire.sampling.nucleus import draw_from_nucleus
from quire.sampling.penalties import TokenCounts, apply_logit_bias, apply_penalties
from quire.sampling.random import draw, uniforms
from quire.sampling.row_slices import row_slices
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, TokenLogprobs

NO_CHOICE = (
    "no token can be chosen: the logits hold NaN or +inf, or are all -inf; "
    "the model overflowed or its weights are damaged, try dtype='float32'"
)
"""What to tell the caller of a request whose token is None."""

Sampled = tuple[int | None, TokenLogprobs | None]
"""The token, None where the logits leave no choice, and its log-probabilities where asked for."""


class SamplingState:
    """What the sampler remembers of one request: its parameters and its tokens, as far as these need them."""

    def __init__(self, new: NewRequest, params: SamplingParams, vocab_size: int) -> None:
        self.request_id = new.request_id
        self.params = params
        self.seed = new.seed
        self.num_tokens = new.num_prompt_tokens
        self._num_prompt_tokens = new.num_prompt_tokens
        end_ids = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(new.eos_token_ids))
        self._end_ids = {token_id for token_id in end_ids if token_id < vocab_size}
        self._bad_words = BadWords(new.bad_words_token_ids) if new.bad_words_token_ids else None
        self._output_ids: list[int] = []
        self.counts: TokenCounts | None = None
        if params.repetition_penalty != 1:
            self.counts = TokenCounts(new.token_ids[: new.num_prompt_tokens])
        elif params.frequency_penalty or params.presence_penalty:
            self.counts = TokenCounts()
        self._is_plain_greedy = (
            params.is_greedy
            and params.logprobs is None
            and params.allowed_token_ids is None
            and not params.logit_bias
            and self.counts is None
            and self._bad_words is None
        )
        for token_id in new.token_ids[new.num_prompt_tokens :]:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take note of one generated token."""
        self.num_tokens += 1
        if self._bad_words is not None:
            self._output_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the argmax of the logits as they are is all this request wants now."""
        return self._is_plain_greedy and not self._bans_end

    @property
    def _bans_end(self) -> bool:
        return self.num_tokens - self._num_prompt_tokens < self.params.min_tokens

    def banned_next(self) -> set[int]:
        """Tokens that bad_words and min_tokens forbid now."""
        banned = set(self._end_ids) if self._bans_end else set()
        if self._bad_words is not None:
            banned |= self._bad_words.banned_next(self._output_ids)
        return banned


class Sampler:
    """Chooses one token per row of logits, as each request's `SamplingParams` say.

    Holds no random state: a request's draws are a function of its seed and the number of tokens it has.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._states: dict[str, SamplingState] = {}

    def add_request(self, new: NewRequest) -> None:
        """Start to sample for a request; one that was preempted or forked brings its generated tokens along."""
        if new.sampling is not None:
            self._states[new.request_id] = SamplingState(new, new.sampling, self.vocab_size)

    def remove_request(self, request_id: str) -> None:
        """Forget a request; an unknown id is fine."""
        self._states.pop(request_id, None)

    def append_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Tell which tokens were appended to a request. `sample` does not append: the scheduler decides."""
        if token_ids and (state := self._states.get(request_id)) is not None:
            for token_id in token_ids:
                state.append(token_id)

    def is_plain_greedy(self, request_ids: Sequence[str]) -> bool:
        """Whether none of these requests wants anything but the likeliest token now."""
        return all(self._states[request_id].is_plain_greedy for request_id in request_ids)

    def sample(self, logits: torch.Tensor, request_ids: Sequence[str]) -> list[Sampled]:
        """Choose the next token of each request, with its log-probabilities where asked for.

        A row that leaves no choice (NaN, +inf or all -inf) gets None; the others are as without it.
        Shapes: logits [S, V], one row per request. Dtypes: fp32. Mutates: logits.
        """
        states = [self._states[request_id] for request_id in request_ids]
        if self.is_plain_greedy(request_ids):
            return [(token_id, None) for token_id in _largest(logits)]
        results: list[Sampled] = []
        for part in row_slices(*logits.shape):
            results += self._sample_slice(logits[part], states[part])
        return results

    def prompt_logprobs(self, logits: torch.Tensor, next_token_ids: Sequence[int], num: int) -> list[TokenLogprobs]:
        """Log-probabilities of prompt tokens given the logits before each. Shapes: logits [S, V], ids [S]."""
        return prompt_logprobs(logits, next_token_ids, num)

    def _sample_slice(self, logits: torch.Tensor, states: list[SamplingState]) -> list[Sampled]:
        reported = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        raw = raw_logprobs(logits[reported]) if reported else None
        self._edit(logits, states)
        token_ids = _choose(logits, states)
        results: list[Sampled] = [(token_id, None) for token_id in token_ids]
        if raw is not None:
            nums = [states[row].params.logprobs or 0 for row in reported]
            found = token_logprobs(raw, [token_ids[row] or 0 for row in reported], nums)
            for row, logprobs in zip(reported, found, strict=True):
                if token_ids[row] is not None:
                    results[row] = (token_ids[row], logprobs)
        return results

    def _edit(self, logits: torch.Tensor, states: list[SamplingState]) -> None:
        """Masks, bias and penalties, each on the rows that have it. Mutates: logits."""
        allowed = {row: kept for row, state in enumerate(states) if (kept := state.params.allowed_token_ids)}
        if allowed:
            keep_only(logits, list(allowed), list(allowed.values()))
        banned = {row: ids for row, state in enumerate(states) if (ids := state.banned_next())}
        banned = {row: ids for row, ids in banned.items() if leaves_a_token(ids, allowed.get(row), self.vocab_size)}
        if banned:
            ban(logits, list(banned), list(banned.values()))
        biases = {row: dict(bias) for row, state in enumerate(states) if (bias := state.params.logit_bias)}
        if biases:
            apply_logit_bias(logits, list(biases), list(biases.values()))
        counts = {row: state.counts for row, state in enumerate(states) if state.counts is not None}
        if counts:
            apply_penalties(logits, list(counts), [states[row].params for row in counts], list(counts.values()))


def _choose(logits: torch.Tensor, states: list[SamplingState]) -> list[int | None]:
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


def _drawn(logits: torch.Tensor, states: list[SamplingState]) -> list[int | None]:
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
