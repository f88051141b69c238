"""The text of single tokens, for lists of log-probabilities.

Next to read: `sequence_output.py`.
"""

from quire.outputs import Logprob, PositionLogprobs
from quire.text.tokenizer import Tokenizer
from quire.types import TokenLogprobs


class TokenTexts:
    """Decodes tokens one by one, once each: at most one entry per token of the vocabulary is kept.

    A token that is only part of a character decodes to U+FFFD. Without a tokenizer all texts are empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """The token alone, special tokens included."""
        found = self._texts.get(token_id)
        if found is None:
            if self._tokenizer is None:
                return ""
            found = self._tokenizer.token_text(token_id)
            self._texts[token_id] = found
        return found

    def describe(self, position: TokenLogprobs) -> PositionLogprobs:
        """Token id → `Logprob`; the token that was chosen comes first, then the likeliest."""
        columns = zip(position.token_ids, position.logprobs, position.ranks, strict=True)
        return {token_id: Logprob(logprob, rank, self.text(token_id)) for token_id, logprob, rank in columns}
