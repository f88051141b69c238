"""The model's tokens as grammars need them.

Next to read: `grammar/compiler.py`.
"""

from quire.errors import InvalidParameterError
from quire.grammar.vocabulary import Vocabulary
from quire.text.tokenizer import Tokenizer

FIELD = "structured_outputs"


def check_vocabulary(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]) -> Tokenizer:
    """Raises: InvalidParameterError if this model's texts can follow no grammar."""
    if tokenizer is None:
        raise InvalidParameterError(FIELD, "a form", "left out: this engine has no tokenizer")
    if tokenizer.byte_decoding is None:
        limit = "left out: this model's tokens are not runs of bytes, so that no grammar can choose among them"
        raise InvalidParameterError(FIELD, "a form", limit)
    if not any(token_id < vocab_size for token_id in eos_token_ids):
        limit = "left out: this model has no end-of-sequence token, so that a complete text could not end"
        raise InvalidParameterError(FIELD, "a form", limit)
    return tokenizer


def make_vocabulary(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    """One entry per logit of the model. Raises: as `check_vocabulary`."""
    tokenizer = check_vocabulary(tokenizer, vocab_size, eos_token_ids)
    ends = tuple(sorted(token_id for token_id in eos_token_ids if token_id < vocab_size))
    return Vocabulary(
        [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
        frozenset(token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size),
        ends,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
