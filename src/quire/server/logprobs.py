"""Log-probabilities as OpenAI's two APIs write them, from the engine's {token id: logprob} per position.

In the engine's lists the token that was chosen comes first, then the likeliest. Next to read: `routes/chat.py`.
"""

from collections.abc import Sequence
from typing import Any

from quire.outputs import Logprob, PositionLogprobs
from quire.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot write; OpenAI's own choice."""


class LogprobWriter:
    """Writes the log-probabilities of one text, position after position.

    num_top: likeliest tokens to show at each position.
    as_ids: write tokens as "token_id:N", which is exact where several tokens look the same.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0

    def chat(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        """The chat API's shape: one object per position."""
        content = []
        for position in positions:
            (token_id, chosen), top = self._split(position)
            content.append({**self._entry(token_id, chosen), "top_logprobs": [self._entry(*item) for item in top]})
        return {"content": content, "refusal": None}

    def legacy(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """The older API's shape: parallel lists. Mutates: where the next token's text begins.

        A position without values (the prompt's first) shows its token only.
        """
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._tokenizer.token_text(token_id)
            columns["tokens"].append(self._name(token_id, text))
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
                # Where two tokens look the same, the likelier one stays.
                shown.setdefault(self._name(key, item.decoded_token), _finite(item.logprob))
            shown.setdefault(self._name(token_id, text), _finite(chosen.logprob))
            columns["top_logprobs"].append(shown)
        return columns

    def _split(self, position: PositionLogprobs) -> tuple[tuple[int, Logprob], list[tuple[int, Logprob]]]:
        chosen = next(iter(position.items()))
        likeliest = sorted(position.items(), key=lambda item: item[1].rank)
        return chosen, likeliest[: self._num_top]

    def _entry(self, token_id: int, value: Logprob) -> dict[str, Any]:
        return {
            "token": self._name(token_id, value.decoded_token),
            "logprob": _finite(value.logprob),
            "bytes": self._bytes(token_id, value),
        }

    def _bytes(self, token_id: int, value: Logprob) -> list[int]:
        if self._tokenizer.byte_decoding is None:
            return list(value.decoded_token.encode())
        return list(self._tokenizer.token_bytes(token_id))

    def _name(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._as_ids else text


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: for each position of the prompt, {token id: logprob, rank and text}."""
    return [None if position is None else _described(position) for position in positions]


def _described(position: PositionLogprobs) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": _finite(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
        for token_id, value in position.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
