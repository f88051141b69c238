import pytest

from quire.server.errors import ApiError
from quire.server.protocol.completion import MAX_CHOICES, CompletionRequest
from quire.server.protocol.validation import validate

BODY = {"model": "m", "prompt": "a"}


def param_of_refusal(**fields: object) -> str | None:
    with pytest.raises(ApiError) as caught:
        validate(CompletionRequest, {**BODY, **fields})
    assert caught.value.code == "invalid_parameter"
    return caught.value.param


def test_prompts_times_n_is_bounded() -> None:
    assert validate(CompletionRequest, {**BODY, "prompt": ["a"] * MAX_CHOICES})
    assert validate(CompletionRequest, {**BODY, "prompt": ["a"] * 16, "n": 128})
    assert param_of_refusal(prompt=["a"] * 17, n=128) == "n"
    assert param_of_refusal(prompt=["a"] * (MAX_CHOICES + 1)) == "prompt"


@pytest.mark.parametrize(("n", "best_of", "is_taken"), [(1, 1, True), (3, 3, True), (3, 1, True), (1, 2, False)])
def test_best_of_is_one_or_n(n: int, best_of: int, is_taken: bool) -> None:
    if is_taken:
        assert validate(CompletionRequest, {**BODY, "n": n, "best_of": best_of})
    else:
        assert param_of_refusal(n=n, best_of=best_of) == "best_of"


def test_no_tokens_only_with_echo() -> None:
    assert param_of_refusal(max_tokens=0) == "max_tokens"
    assert validate(CompletionRequest, {**BODY, "max_tokens": 0, "echo": True})


def test_prompt_logprobs_are_streamed_as_part_of_an_echo_only() -> None:
    assert param_of_refusal(prompt_logprobs=1, stream=True) == "prompt_logprobs"
    assert validate(CompletionRequest, {**BODY, "echo": True, "logprobs": 1, "stream": True})


def test_a_suffix_is_refused() -> None:
    with pytest.raises(ApiError, match="only continues text") as caught:
        validate(CompletionRequest, {**BODY, "suffix": "x"})
    assert caught.value.code == "unsupported_parameter"
