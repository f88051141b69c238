"""Log-probabilities in the formats of OpenAI's APIs, from the engine's {token id: logprob} per position.

In the engine's dicts the sampled token comes first, then the most likely ones. Next to read: `routes/chat.py`.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from quire.outputs import CompletionOutput, Logprob, PositionLogprobs
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer

MAX_KNOWN = 256
"""Tokens whose names and bytes are kept, at some 300 bytes."""
LEAST = -9999.0
"""Replaces minus infinity, which JSON does not have; OpenAI does the same."""


class LogprobWriter:
    """Writes the log-probabilities of one text, position after position.

    num_top: most likely tokens to write at each position.
    as_ids: write tokens as "token_id:N", which is exact if several tokens have the same text.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0
        self._known: dict[int, tuple[str, list[int]]] = {}
        """Name and bytes of tokens: the same few are among the likeliest again and again."""

    def chat(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        """Return the chat API's format: one object per position."""
        content = []
        for position in positions:
            (token_id, chosen), top = self._split(position)
            content.append({**self._entry(token_id, chosen), "top_logprobs": [self._entry(*item) for item in top]})
        return {"content": content, "refusal": None}

    def legacy(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """Return the completions API's format: parallel lists. Mutates: the offset of the next token's text.

        A position without values (the prompt's first) has its token only. `token_bytes` has the bytes of
        tokens that are written as ids.
        """
        columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        token_bytes: dict[str, list[int]] = {}
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._tokenizer.token_text(token_id)
            name = self._name(token_id, text)
            token_bytes[name] = self._bytes(token_id, text)
            columns["tokens"].append(name)
            columns["text_offset"].append(self._offset)
            self._offset += len(text)
            if position is None:
                columns["token_logprobs"].append(None)
                columns["top_logprobs"].append(None)
                continue
            (_, chosen), top = self._split(position)
            columns["token_logprobs"].append(_finite(chosen.logprob))
            shown: dict[str, float] = {}
            for key, item in top:
                # Of two tokens with the same text, keep the more likely one.
                top_name = self._name(key, item.decoded_token)
                shown.setdefault(top_name, _finite(item.logprob))
                token_bytes[top_name] = self._bytes(key, item.decoded_token)
            shown.setdefault(name, _finite(chosen.logprob))
            columns["top_logprobs"].append(shown)
        return columns | ({"token_bytes": token_bytes} if self._as_ids else {})

    def _split(self, position: PositionLogprobs) -> tuple[tuple[int, Logprob], list[tuple[int, Logprob]]]:
        chosen = next(iter(position.items()))
        likeliest = sorted(position.items(), key=lambda item: item[1].rank)
        return chosen, likeliest[: self._num_top]

    def _entry(self, token_id: int, value: Logprob) -> dict[str, Any]:
        known = self._known.get(token_id)
        if known is None:
            name = self._name(token_id, value.decoded_token)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[token_id] = name, self._bytes(token_id, value.decoded_token)
        return {"token": known[0], "logprob": _finite(value.logprob), "bytes": known[1]}

    def _bytes(self, token_id: int, text: str) -> list[int]:
        if self._tokenizer.byte_decoding is None:
            return list(text.encode())
        return list(self._tokenizer.token_bytes(token_id))

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._as_ids else text


class TextLogprobs:
    """Finds chat log-probabilities by place in the text, in characters. Each entry is taken once, with the first part
    of the text that has a character of its token.

    The tokens are detokenised a second time for it: the engine may hold text back (stop strings, tool calls).
    """

    def __init__(self, writer: LogprobWriter, detokenizer: IncrementalDetokenizer) -> None:
        """detokenizer: at the end of the prompt, with the request's own settings."""
        self._writer = writer
        self._detokenizer = detokenizer
        self._waiting: deque[tuple[int, int, list[dict[str, Any]]]] = deque()
        """Start and end of a piece of text, and the entries of its tokens; in order."""
        self._open: list[dict[str, Any]] = []
        """Entries of tokens that end within a character."""
        self._num_chars = 0
        self._taken_end = 0

    def add(self, choice: CompletionOutput) -> None:
        """Add new tokens."""
        content = self._writer.chat(choice.logprobs or [])["content"]
        for token_id, entry in zip(choice.token_ids, content, strict=True):
            self._open.append(entry)
            start = self._num_chars
            self._num_chars += len(self._detokenizer.append(token_id))
            if self._num_chars > start:
                self._waiting.append((start, self._num_chars, self._open))
                self._open = []

    def take(self, start: int, end: int) -> list[dict[str, Any]]:
        """Return the entries of the text from `start` up to `end`. Mutates: drops them and all before them."""
        self._taken_end = end
        found: list[dict[str, Any]] = []
        while self._waiting and self._waiting[0][0] < end:
            _, piece_end, entries = self._waiting.popleft()
            if piece_end > start:
                found += entries
        return found

    def take_rest(self, text_len: int) -> list[dict[str, Any]]:
        """Return the entries after a text of `text_len` characters, if its end was taken: an end token, or a stop
        string that was cut off."""
        if self._taken_end < text_len:
            return []
        return [entry for _, _, entries in self._waiting for entry in entries] + self._open


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """Return vLLM's format: for each position of the prompt, {token id: logprob, rank and text}."""
    return [None if position is None else _described(position) for position in positions]


def _described(position: PositionLogprobs) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": _finite(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
        for token_id, value in position.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
