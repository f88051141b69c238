import pytest

from quire.server.errors import ApiError
from quire.server.protocol.chat import RESERVED_VARIABLES, ChatRequest
from quire.server.protocol.validation import validate
from tests.server.fake_engine import CHAT


def param_of_refusal(**fields: object) -> str | None:
    with pytest.raises(ApiError) as caught:
        validate(ChatRequest, {**CHAT, **fields})
    assert caught.value.code == "invalid_parameter"
    return caught.value.param


def test_fields_that_contradict_each_other() -> None:
    assert param_of_refusal(continue_final_message=True, add_generation_prompt=True) == "continue_final_message"
    assert param_of_refusal(top_logprobs=2) == "top_logprobs"
    assert param_of_refusal(stream_options={"include_usage": True}) == "stream_options"
    assert param_of_refusal(prompt_logprobs=1, stream=True) == "prompt_logprobs"


@pytest.mark.parametrize("name", [*sorted(RESERVED_VARIABLES), "not a name", "", "x" * 65, "a.b"])
def test_template_variables_with_reserved_names_are_refused(name: str) -> None:
    assert param_of_refusal(chat_template_kwargs={name: 1}) == "chat_template_kwargs"


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u"}, {"metadata": {"a": 1}}, {"store": True}, {"service_tier": "auto"}, {"safety_identifier": "s"},
        {"prompt_cache_key": "k"}, {"prompt_cache_retention": "24h"}, {"parallel_tool_calls": True},
        {"reasoning_effort": "low"}, {"modalities": ["text"]}, {"verbosity": "low"}, {"include_reasoning": True},
        {"session_id": "s"}, {"stream_interval": 5}, {"top_logprobs": 0},
        {"prediction": {"type": "content", "content": "x"}}, {"n": None}, {"stream": None}, {"logprobs": None},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_fields_without_effect_are_taken(field: dict[str, object]) -> None:
    assert validate(ChatRequest, {**CHAT, **field})


def test_answer_can_be_sent_back_as_a_message() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    for more in ({}, {"audio": None, "function_call": None, "annotations": None}):
        assert validate(ChatRequest, {**CHAT, "messages": [*CHAT["messages"], {**answer, **more}]})
