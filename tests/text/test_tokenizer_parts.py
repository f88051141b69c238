import pytest
import tokenizers
from tokenizers import models

from quire.text.tokenizer_parts import add_bos_and_eos


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [
        (None, None, [0]),
        ("<s>", None, [1, 0]),
        (None, "</s>", [0, 2]),
        ("<s>", "</s>", [1, 0, 2]),
        ("a b:1", "a b:1", [3, 0, 3]),
    ],
)
def test_tokens_are_put_around_the_text(bos: str | None, eos: str | None, expected: list[int]) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"x": 0, "<s>": 1, "</s>": 2, "a b:1": 3}, merges=[]))
    add_bos_and_eos(backend, bos=bos, eos=eos)
    assert backend.encode("x").ids == expected
    assert backend.encode("x", add_special_tokens=False).ids == [0]
