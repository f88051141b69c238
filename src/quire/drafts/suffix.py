"""`SuffixProposer`: drafts from a request's own text and from finished answers, found by the longest equal suffix.

While its drafts are right, a request follows one place in an index; when one is wrong it looks near by, as after a word
that was replaced, then for the longest suffix that occurred before. Estimates come from what proposals turned out to
be, verified or not: each is compared with the tokens that the request then got.
Next to read: `token_index.py`; `drafting.py`, which asks for drafts.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from quire.drafts.token_index import END, LONGEST_MATCH, Match, TokenIndex
from quire.scheduler.request import Request
from quire.types import Draft

MAX_FINISHED_TOKENS = 1 << 16
"""Tokens of finished answers that are kept for requests with the same salt: the half of them when older ones go."""
MAX_SALTS = 64
NEAR_BEFORE, NEAR_BEHIND = 4, 12
"""Tokens around a place that turned out wrong in which the next token is looked for."""
_CLASS_STARTS = (1, 3, 4, 6, 9, 17)
"""Match lengths at which a class of places begins that are equally often right."""
_PRIOR_RATES = (0.4, 0.3, 0.45, 0.6, 0.75, 0.9)
_PRIOR_RATES_AHEAD = (0.8, 0.8, 0.85, 0.9, 0.93, 0.97)
"""Of a draft's tokens behind the first one, given that all before are right: those have shown that the place is one
that goes on alike, whatever the length of its match."""
_PRIOR_WEIGHT = 8.0
_KEPT = 0.98
"""Weight of what was seen before, beside each new observation."""


@dataclass(slots=True)
class _Rate:
    """Share of right tokens among those seen, the newest counting most."""

    num_right: float
    num_seen: float

    def note(self, *, is_right: bool) -> None:
        self.num_right = self.num_right * _KEPT + is_right
        self.num_seen = self.num_seen * _KEPT + 1


class _Rates:
    """Rates by kind of place; those of one request start from those of all."""

    def __init__(self, of_all: "_Rates | None" = None) -> None:
        self._of_all = of_all
        self._rates: dict[tuple[Hashable, int], _Rate] = {}

    def share(self, kind: Hashable, match_len: int, ahead: int) -> float:
        class_index = _class_of(match_len, ahead)
        rate = self._rates.get((kind, class_index))
        if self._of_all is None:
            return rate.num_right / rate.num_seen if rate else _PRIORS[class_index]
        prior = self._of_all.share(kind, match_len, ahead)
        if rate is None:
            return prior
        return (rate.num_right + _PRIOR_WEIGHT / 2 * prior) / (rate.num_seen + _PRIOR_WEIGHT / 2)

    def note(self, kind: Hashable, match_len: int, ahead: int, *, is_right: bool) -> None:
        class_index = _class_of(match_len, ahead)
        if (kind, class_index) not in self._rates:
            weight = 0.0 if self._of_all else _PRIOR_WEIGHT
            self._rates[kind, class_index] = _Rate(weight * _PRIORS[class_index], weight)
        self._rates[kind, class_index].note(is_right=is_right)
        if self._of_all is not None:
            self._of_all.note(kind, match_len, ahead, is_right=is_right)


_PRIORS = _PRIOR_RATES + _PRIOR_RATES_AHEAD


def _class_of(match_len: int, ahead: int) -> int:
    """Return the index in `_PRIORS` of a draft's token number `ahead`, at a place with a match of this length."""
    class_index = bisect_right(_CLASS_STARTS, min(match_len + ahead, LONGEST_MATCH)) - 1
    return class_index + (len(_CLASS_STARTS) if ahead else 0)


START = Match(0, 0)


@dataclass(slots=True, eq=False)
class _Follower:
    """A request's index, the place that it follows in one, its last proposal, and the place that turned out wrong."""

    request: Request
    rates: _Rates
    index: TokenIndex = field(default_factory=TokenIndex)
    followed: TokenIndex | None = None
    place: Match = START
    proposed: tuple[int, ...] = ()
    lost: tuple[TokenIndex, int] | None = None
    num_since_lost: int = 0


class SuffixProposer:
    """Proposes what followed the same tokens before."""

    def __init__(self) -> None:
        self._followers: list[_Follower] = []
        self._finished: OrderedDict[Hashable, list[TokenIndex]] = OrderedDict()
        self._rates = _Rates()

    def propose(self, request: Request, max_tokens: int) -> Draft:
        """Return a draft of at most `max_tokens` tokens; empty if nothing like the last tokens occurred before.

        Takes note of all tokens that the request got since the last call.
        """
        follower: _Follower | None = request.drafting.follower
        if follower is None:
            follower = request.drafting.follower = _Follower(request, _Rates(self._rates))
            self._followers.append(follower)
        self._take_up(follower)
        source = follower.followed
        if source is None:
            follower.proposed = ()
            return Draft()
        position, match_len = follower.place
        follower.proposed = token_ids = source.following(position, max_tokens)
        kind = self._kind(follower)
        return Draft(
            token_ids,
            tuple(follower.rates.share(kind, match_len, ahead) for ahead in range(len(token_ids))),
        )

    def forget_finished(self) -> None:
        """Keep the answers of requests that have ended, and drop what is kept for them alone."""
        for follower in [each for each in self._followers if each.request.status.is_finished]:
            self._followers.remove(follower)
            self._keep(follower.request)

    def _keep(self, request: Request) -> None:
        token_ids = request.output_token_ids
        if len(token_ids) <= LONGEST_MATCH or len(token_ids) > MAX_FINISHED_TOKENS // 2:
            return
        salt = request.spec.hash_extras
        indices = self._finished.setdefault(salt, [TokenIndex()])
        self._finished.move_to_end(salt)
        if len(indices[-1].tokens) + len(token_ids) > MAX_FINISHED_TOKENS // 2:
            indices.append(TokenIndex())
            del indices[:-2]
        indices[-1].extend([*token_ids, END])
        if len(self._finished) > MAX_SALTS:
            self._finished.popitem(last=False)

    def _take_up(self, follower: _Follower) -> None:
        request, index = follower.request, follower.index
        num_known = len(index.tokens)
        new = request.token_slice(num_known, request.num_tokens)
        if not new:
            return
        self._judge(follower, new)
        index.extend(new)
        follower.num_since_lost += len(new)
        if follower.followed is not None:
            self._follow(follower, follower.followed, new)
        if follower.followed is None:
            self._search(follower)

    def _follow(self, follower: _Follower, source: TokenIndex, new: list[int]) -> None:
        position, match_len = follower.place
        for num_before, token_id in enumerate(new):
            if position == len(source.tokens) or source.tokens[position] != token_id:
                follower.followed, follower.lost = None, (source, position)
                follower.num_since_lost = len(new) - num_before
                return
            position, match_len = position + 1, min(match_len + 1, LONGEST_MATCH)
        follower.place = Match(position, match_len)

    def _judge(self, follower: _Follower, new: list[int]) -> None:
        """Compare the last proposal with the tokens that came."""
        kind, match_len = self._kind(follower), follower.place.match_len
        for ahead, (guess, token_id) in enumerate(zip(follower.proposed, new, strict=False)):
            is_right = guess == token_id
            follower.rates.note(kind, match_len, ahead, is_right=is_right)
            if not is_right:
                break

    def _search(self, follower: _Follower) -> None:
        num_tokens = follower.request.num_tokens
        context = follower.request.token_slice(max(0, num_tokens - LONGEST_MATCH), num_tokens)
        for index in (follower.index, *reversed(self._finished.get(follower.request.spec.hash_extras, ()))):
            found = index.find(context)
            if found is not None and (follower.followed is None or found.match_len > follower.place.match_len):
                follower.followed, follower.place = index, found
        if follower.followed is not None or follower.lost is None or follower.num_since_lost > NEAR_BEHIND:
            return
        source, position = follower.lost
        start = max(0, position - NEAR_BEFORE)
        near = source.tokens[start : position + NEAR_BEHIND]
        if context[-1] in near and (found_at := start + near.index(context[-1]) + 1) < len(source.tokens):
            follower.followed, follower.place = source, Match(found_at, 1)

    def _kind(self, follower: _Follower) -> Hashable:
        sampling = follower.request.sampling
        return follower.followed is follower.index, sampling is not None and sampling.temperature == 0
