from collections.abc import Sequence
from typing import Any

import pytest

from quire.engine.prompts import ParsedPrompt, parse_prompt, split_prompts
from quire.errors import PromptError


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ParsedPrompt("hi", None)),
        ([1, 2], ParsedPrompt(None, [1, 2])),
        ((1, 2), ParsedPrompt(None, [1, 2])),
        (range(3), ParsedPrompt(None, [0, 1, 2])),
        ({"prompt": "hi"}, ParsedPrompt("hi", None)),
        ({"prompt_token_ids": [1]}, ParsedPrompt(None, [1])),
        ({"prompt": "hi", "prompt_token_ids": [1]}, ParsedPrompt("hi", [1])),
        ({"prompt": "", "prompt_token_ids": [1]}, ParsedPrompt("", [1])),
        ({"prompt": "hi", "cache_salt": "s"}, ParsedPrompt("hi", None, "s")),
    ],
)
def test_all_forms(prompt: Any, expected: ParsedPrompt) -> None:
    assert parse_prompt(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([], "empty"),
        ((), "empty"),
        ({}, "neither"),
        ({"prompt": None}, "neither"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 3}, "int"),
        ({"prompt": 3, "prompt_token_ids": [1]}, "int"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": "12"}, "str"),
        ({"prompt_token_ids": 5}, "int"),
        ({"promt": "hi"}, "did you mean 'prompt'"),
        ({"prompt": "hi", "cache_salt": 1}, "cache_salt"),
        (None, "NoneType"),
        (3, "int"),
        (True, "bool"),
        (b"hi", "bytes"),
        ([True], "bool at position 0"),
        ([1, 2.0], "float at position 1"),
        (["hi"], "str at position 0"),
        ("\ud800", "surrogate at character 0"),
    ],
)
def test_wrong_forms_say_what_is_wrong(prompt: Any, says: str) -> None:
    with pytest.raises(PromptError) as caught:
        parse_prompt(prompt)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([{"prompt": "a"}, "b", [1]], [{"prompt": "a"}, "b", [1]]),
        ([], []),
        ([True], [True]),
    ],
)
def test_one_prompt_or_many(prompts: Any, expected: Sequence[Any]) -> None:
    assert split_prompts(prompts) == expected


def test_arrays_are_pointed_to_tolist() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(PromptError, match="tolist"):
        parse_prompt(numpy.array([1, 2]))
