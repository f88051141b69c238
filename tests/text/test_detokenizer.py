from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer
from tests.text.builders import TEXTS, byte_level_tokenizer, sentencepiece_tokenizer, word_piece_tokenizer

BYTEWISE = [byte_level_tokenizer, sentencepiece_tokenizer]
IDS = st.lists(st.integers(0, 620), max_size=30)


def stream(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.append(token_id) for token_id in output), detokenizer.finish()]


@pytest.mark.parametrize("make", [*BYTEWISE, word_piece_tokenizer])
@given(text=TEXTS, skip=st.booleans())
def test_deltas_add_up_to_the_decoded_text(make: Callable[[], Tokenizer], text: str, skip: bool) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, [], ids, skip_special_tokens=skip)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("make", BYTEWISE)
@given(ids=IDS, skip=st.booleans())
@example(ids=[0xE4 + 3, 0xBD + 3, 0xFF + 3], skip=True)
def test_any_ids_add_up_to_the_decoded_text(make: Callable[[], Tokenizer], ids: list[int], skip: bool) -> None:
    tokenizer = make()
    assert "".join(stream(tokenizer, [], ids, skip_special_tokens=skip)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("make", BYTEWISE)
@given(text=TEXTS, data=st.data())
def test_text_after_a_prompt_continues_it(make: Callable[[], Tokenizer], text: str, data: st.DataObject) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    before = tokenizer.decode(ids[:cut]).rstrip("\ufffd") if "\ufffd" not in text else None
    if before is not None:
        assert before + "".join(stream(tokenizer, ids[:cut], ids[cut:])) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", BYTEWISE)
def test_character_appears_when_its_last_byte_does(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    ids = [token_id for token_id in tokenizer.encode("a🦩") if tokenizer.token_bytes(token_id) not in (b" ", b"")]
    deltas = stream(tokenizer, tokenizer.encode("x"), ids)
    assert len(ids) > 3
    assert "".join(deltas[:-2]).strip() == "a"
    assert deltas[-2:] == ["🦩", ""]


def test_first_word_after_a_prompt_keeps_its_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    word = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode(word) == "the"
    assert "".join(stream(tokenizer, tokenizer.encode("over"), word)) == " the"
    assert "".join(stream(tokenizer, [1], word)) == "the"
