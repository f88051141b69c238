"""Positions at which prompts differ from earlier prompts that they mostly repeat: what follows is computed again.

The prefix cache finds what two prompts share from their first token on. A client that changes a date, a header or the
order of tools in front of a long text therefore pays for all of that text, and sees nothing but a slow answer. The
server remembers the token ids of recent prompts per caller, finds such positions and counts them. Never shows content.
Next to read: `generation.py`, which notes prompts, and `gate.py`, whose log line has the position.
"""

import asyncio
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MIN_REPEATED = 64
"""Fewest tokens in a row behind the position that both prompts have; fewer are chance, or cost nothing."""
MAX_PROMPTS = 16
"""Prompts that are remembered per caller: about as many conversations at a time."""
MAX_TOKENS = 1 << 20
"""Tokens of all remembered prompts, at 4 bytes."""
LONG_PROMPT = 2048
"""Tokens from which on a prompt is compared in a thread: 20,000 take up to a millisecond, and other streams would
wait."""
_TOKEN = 4
"""Bytes of a token id."""
_Caller = tuple[str, ...]


class PrefixBreaks:
    """Recent prompts of one model and the breaks among them.

    Attributes: `num_breaks`; `num_lost_tokens`, which would have been found in the cache without breaks; `last_at`,
    position of the last break.
    """

    def __init__(self) -> None:
        self.num_breaks = 0
        self.num_lost_tokens = 0
        self.last_at: int | None = None
        self._prompts: OrderedDict[_Caller, list[bytes]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    async def note(self, caller: _Caller, token_ids: Sequence[int]) -> int | None:
        """Remember a prompt. Returns: the position at which it broke with an earlier one of the same caller."""
        if len(token_ids) < MIN_REPEATED:
            return None
        if len(token_ids) < LONG_PROMPT:
            return self._note(caller, token_ids)
        return await asyncio.to_thread(self._note, caller, token_ids)

    def _note(self, caller: _Caller, token_ids: Sequence[int]) -> int | None:
        prompt = array("I", token_ids).tobytes()
        with self._lock:
            prompts = self._prompts.setdefault(caller, [])
            self._prompts.move_to_end(caller)
            found = _find(prompts, prompt)
            if found is not None and found.is_replaced:
                prompts.remove(found.prompt)
                self._num_bytes -= len(found.prompt)
            if found is not None and found.broke_at is not None:
                self.num_breaks += 1
                self.num_lost_tokens += min(len(found.prompt), len(prompt)) // _TOKEN - found.broke_at
                self.last_at = found.broke_at
            prompts.append(prompt)
            self._num_bytes += len(prompt)
            self._forget(prompts)
        return None if found is None else found.broke_at

    def _forget(self, prompts: list[bytes]) -> None:
        """Drop the oldest prompts beyond the limits: those of a caller, then those of the caller seen longest ago."""
        while len(prompts) > MAX_PROMPTS:
            self._num_bytes -= len(prompts.pop(0))
        while self._num_bytes > MAX_TOKENS * _TOKEN:
            caller, oldest = next(iter(self._prompts.items()))
            self._num_bytes -= len(oldest.pop(0))
            if not oldest:
                del self._prompts[caller]


@dataclass(frozen=True, slots=True)
class _Found:
    """An earlier prompt that a new one repeats. `broke_at` None: it goes on it. `is_replaced`: it will not come again,
    since the new one is a later turn of the same conversation."""

    prompt: bytes
    broke_at: int | None
    is_replaced: bool


def _find(prompts: list[bytes], prompt: bytes) -> _Found | None:
    newest_first = prompts[::-1]
    for earlier in newest_first:
        if prompt.startswith(earlier):
            return _Found(earlier, None, is_replaced=True)
    shared = [_num_shared(earlier, prompt) for earlier in newest_first]
    most = max(shared, default=0)
    for num_shared, earlier in zip(shared, newest_first, strict=True):
        if most - num_shared >= MIN_REPEATED:
            continue  # the cache has more from another prompt
        num_left = len(earlier) // _TOKEN - num_shared
        if num_left < MIN_REPEATED <= num_shared:  # an opening of the answer that the template later leaves out
            return _Found(earlier, None, is_replaced=True)
        end, *others = _samples(earlier, num_shared)
        is_replaced = _has(prompt, end, num_shared)
        if sum(_has(prompt, sample, num_shared) for sample in others) + is_replaced > 1:
            return _Found(earlier, num_shared, is_replaced)
    return None


def _num_shared(a: bytes, b: bytes) -> int:
    """Return the number of tokens that two prompts share from their first on."""
    low, high = 0, min(len(a), len(b)) // _TOKEN
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * _TOKEN : middle * _TOKEN] == b[low * _TOKEN : middle * _TOKEN]:
            low = middle
        else:
            high = middle - 1
    return low


def _samples(earlier: bytes, start: int) -> list[bytes]:
    """Return the end of an earlier prompt and two more pieces of it, all behind `start` tokens.

    Another conversation that begins with the same system text has none of them, the same one with another date in the
    system text most.
    """
    num_free = max(0, len(earlier) // _TOKEN - start - MIN_REPEATED)
    starts = [(start + num_free * thirds // 3) * _TOKEN for thirds in (3, 2, 1)]
    return [earlier[at : at + MIN_REPEATED * _TOKEN] for at in starts]


def _has(prompt: bytes, sample: bytes, start: int) -> bool:
    """Return True if a prompt has a sample of full length behind `start` tokens."""
    return len(sample) == MIN_REPEATED * _TOKEN and prompt.find(sample, start * _TOKEN) >= 0
