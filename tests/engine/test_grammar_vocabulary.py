import pytest
import tokenizers

from quire.engine.grammar_vocabulary import make_vocabulary
from quire.errors import InvalidParameterError
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_parts import TokenizerParts
from tests.engine.builders import EOS, VOCAB_SIZE, byte_tokenizer


def test_one_entry_per_logit() -> None:
    tokenizer = byte_tokenizer()
    vocabulary = make_vocabulary(tokenizer, VOCAB_SIZE + 3, frozenset({EOS, VOCAB_SIZE + 9}))
    assert [vocabulary.tokens[97], vocabulary.tokens[255], vocabulary.tokens[VOCAB_SIZE]] == [b"a", b"\xff", b""]
    assert len(vocabulary.tokens) == VOCAB_SIZE + 3
    assert vocabulary.eos_token_ids == (EOS,)
    assert vocabulary.special_token_ids == tokenizer.special_token_ids
    assert list(vocabulary.encode("ab")) == [97, 98]


def test_fewer_logits_than_tokens() -> None:
    vocabulary = make_vocabulary(byte_tokenizer(), 100, frozenset({5}))
    assert len(vocabulary.tokens) == 100
    assert max(vocabulary.special_token_ids, default=0) < 100


def test_what_cannot_follow_a_grammar_says_so() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    for tokenizer, ends, says in (
        (None, {0}, "no tokenizer"),
        (Tokenizer(TokenizerParts(words, None, 0)), {0}, "not runs of bytes"),
        (byte_tokenizer(), set(), "no end-of-sequence token"),
    ):
        with pytest.raises(InvalidParameterError, match=says):
            make_vocabulary(tokenizer, VOCAB_SIZE, frozenset(ends))
