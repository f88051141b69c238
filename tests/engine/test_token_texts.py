from quire.engine.token_texts import TokenTexts
from quire.outputs import Logprob
from quire.types import TokenLogprobs
from tests.engine.builders import EOS, VOCAB_SIZE, byte_tokenizer


def test_tokens_alone_have_their_text_and_special_ones_too() -> None:
    texts = TokenTexts(byte_tokenizer())
    assert texts.text(97) == "a"
    assert texts.text(EOS) == "<eos>"
    assert texts.text("é".encode()[0]) == "\ufffd"
    assert texts.text(VOCAB_SIZE - 1) == "", "the model's vocabulary may be larger than the tokenizer's"


def test_the_chosen_token_comes_first() -> None:
    position = TokenLogprobs((98, 97), (-2.0, -0.5), (2, 1))
    described = TokenTexts(byte_tokenizer()).describe(position)
    assert list(described.items()) == [(98, Logprob(-2.0, 2, "b")), (97, Logprob(-0.5, 1, "a"))]


def test_without_a_tokenizer_texts_are_empty() -> None:
    assert TokenTexts(None).text(97) == ""
