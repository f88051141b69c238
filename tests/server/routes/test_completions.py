"""`/v1/completions`, whole and as a stream."""

import asyncio
import json
from typing import Any

import openai
import pytest
from starlette.applications import Starlette

from quire.server.front_end import FrontEnd
from quire.server.protocol.prompts import Completion
from quire.server.routes.exchange import MAX_SHARED_CHARACTERS
from quire.structured_outputs import STRUCTURED_OUTPUTS_FAILED
from tests.engine.builders import EOS, byte_tokenizer, mixing, saying
from tests.server.fake_engine import (
    MODEL,
    FakeEngine,
    assert_error,
    chunks,
    in_loop,
    listening,
    make_server,
    post,
    requests_to,
)
from tests.text.infill_cases import QWEN, fim_tokenizer

PATH = "/v1/completions"


async def ask(fields: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return a good answer; checks it against its schema."""
    app, engine = make_server(**({"next_token": saying("Hello wörld")} | settings))
    response = await post(app, PATH, {"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Completion.model_validate(answer)
    assert engine.num_requests == 0
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
@in_loop
async def test_text_and_token_ids_give_the_same_continuation(prompt: Any) -> None:
    answer = await ask({"prompt": prompt})
    assert (answer["object"], texts(answer)) == ("text_completion", ["Hello wörld"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["timings"]["predicted_n"] == 13


@pytest.mark.parametrize("prompt", [["a", "bc", "def"], [[97], [98, 99], [100, 101, 102]]])
@in_loop
async def test_several_prompts_times_n_are_in_order(prompt: Any) -> None:
    answer = await ask({"prompt": prompt, "n": 2, "seed": 5, "max_tokens": 4}, next_token=mixing)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 24
    for position, one in enumerate(prompt):
        alone = await ask({"prompt": one, "n": 2, "seed": 5, "max_tokens": 4}, next_token=mixing)
        assert texts(alone) == texts(answer)[2 * position : 2 * position + 2]


@in_loop
async def test_default_max_tokens_is_sixteen() -> None:
    answer = await ask({"prompt": "a"}, next_token=mixing)
    assert (len(texts(answer)[0]), answer["choices"][0]["finish_reason"]) == (16, "length")


@in_loop
async def test_echo_has_the_prompts_log_probabilities_in_front() -> None:
    answer = await ask({"prompt": ["ab", "cd"], "echo": True, "logprobs": 2, "max_tokens": 1})
    assert texts(answer) == ["abH", "cdH"]
    logprobs = answer["choices"][1]["logprobs"]
    assert (logprobs["tokens"], logprobs["text_offset"]) == (["c", "d", "H"], [0, 1, 2])
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])


@in_loop
async def test_prompt_is_scored_without_generating() -> None:
    answer = await ask({"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("abc", "length", [])
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["prompt_token_ids"] == [97, 98, 99]


@in_loop
async def test_tokens_as_ids_come_with_the_bytes_of_each() -> None:
    answer = await ask(
        {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 1, "return_tokens_as_token_ids": True}
    )
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["token_id:97", "token_id:98", "token_id:99"]
    named = {*logprobs["tokens"], *(name for top in logprobs["top_logprobs"] for name in top or ())}
    bytes_of = byte_tokenizer().token_bytes
    assert logprobs["token_bytes"] == {name: list(bytes_of(int(name.removeprefix("token_id:")))) for name in named}


@in_loop
async def test_prompt_logprobs_are_part_of_each_choice() -> None:
    answer = await ask({"prompt": ["ab", "c"], "prompt_logprobs": 0, "max_tokens": 1})
    assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [2, 1]


@in_loop
async def test_cut_prompt_is_echoed_as_it_was_computed() -> None:
    answer = await ask({"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 1})
    assert texts(answer) == ["efH"]
    assert answer["usage"]["prompt_tokens_details"]["truncated_tokens"] == 4


# --- Streams ----------------------------------------------------------------------------------


async def stream(fields: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    app, engine = make_server(**({"next_token": saying("Hello wörld")} | settings))
    response = await post(app, PATH, {"model": MODEL, "stream": True, **fields})
    assert response.status_code == 200, response.text
    found = chunks(response.text)
    for chunk in found:
        Completion.model_validate(chunk)
    assert engine.num_requests == 0
    return found


def streamed(found: list[dict[str, Any]], index: int) -> str:
    return "".join(choice["text"] for chunk in found for choice in chunk["choices"] if choice["index"] == index)


@in_loop
async def test_streams_of_several_prompts_are_interleaved_and_equal_the_whole_answer() -> None:
    fields = {"prompt": ["a", "bc", "def"], "n": 2, "seed": 3, "max_tokens": 5, "temperature": 1}
    whole = await ask(fields, next_token=mixing)
    found = await stream(fields, next_token=mixing)
    assert [streamed(found, index) for index in range(6)] == texts(whole)
    order = [chunk["choices"][0]["index"] for chunk in found]
    assert order != sorted(order), "no choice waits for the end of another"
    ends = [choice["index"] for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == list(range(6))


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"max_tokens": 0}, {"logprobs": 0}], ids=str)
@in_loop
async def test_streamed_echo_begins_with_the_prompts_log_probabilities(fields: dict[str, Any]) -> None:
    fields = {"prompt": ["abc", "d"], "echo": True, "logprobs": 2, "max_tokens": 4, **fields}
    whole = await ask(fields)
    found = await stream(fields)
    for choice in whole["choices"]:
        mine = [part for chunk in found for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        first = mine[0]["logprobs"]
        assert first["token_logprobs"][0] is None
        assert "".join(first["tokens"]).startswith("abc" if choice["index"] < len(whole["choices"]) // 2 else "d")
        for name, values in choice["logprobs"].items():
            assert [value for part in mine for value in part["logprobs"][name]] == values


@in_loop
async def test_usage_of_all_prompts_comes_last() -> None:
    options = {"include_usage": True}
    *others, last = await stream({"prompt": ["a", "bc"], "max_tokens": 3, "stream_options": options})
    assert all(chunk["usage"] is None for chunk in others)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 9)
    options["continuous_usage_stats"] = True
    found = await stream({"prompt": "a", "max_tokens": 3, "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in found] == [1, 2, 3, 3]


@in_loop
async def test_one_bad_prompt_refuses_them_all_before_anything_runs() -> None:
    app, engine = make_server()
    async with requests_to(app) as client:
        for fields in ({"prompt": ["a", "x" * 500]}, {"prompt": [[1], [999]]}):
            response = await client.post(PATH, json={"model": MODEL, **fields})
            assert response.status_code == 400
        assert_error(response, 400, "invalid_prompt")
    assert engine.submitted == []


@in_loop
@pytest.mark.parametrize("streams", [False, True])
async def test_structured_output_dead_end_is_a_400(streams: bool) -> None:
    app, engine = make_server()
    engine.executor.error_code = STRUCTURED_OUTPUTS_FAILED
    engine.executor.in_step = lambda step: engine.executor.errors.update(
        {engine.submitted[0].request_id: "nothing may follow"} if step == 3 else {}
    )
    body = {"model": MODEL, "prompt": "a", "max_tokens": 50, "stream": streams}
    response = await post(app, PATH, body)
    if streams:
        *_, last, done = response.text.split("data: ")
        assert done.strip() == "[DONE]"
        error = json.loads(last)["error"]
        assert error == {"message": "nothing may follow", "type": "invalid_request_error",
                         "param": "structured_outputs", "code": STRUCTURED_OUTPUTS_FAILED}  # fmt: skip
    else:
        assert assert_error(response, 400, STRUCTURED_OUTPUTS_FAILED, "structured_outputs") == "nothing may follow"


@in_loop
async def test_failed_prompt_aborts_the_other_prompts() -> None:
    app, engine = make_server()
    engine.executor.in_step = lambda step: engine.executor.errors.update(
        {engine.submitted[1].request_id: "broken"} if step == 3 else {}
    )
    async with requests_to(app) as client:
        response = await client.post(PATH, json={"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 50})
        message = assert_error(response, 500, "generation_failed")
    assert message == "broken"
    assert engine.num_requests == 0
    assert {engine.submitted[0].request_id, engine.submitted[2].request_id} == set(engine.aborted)


# --- Fill in the middle -------------------------------------------------------------------------


def filling(text: str = "fill", **settings: Any) -> tuple[Starlette, FakeEngine]:
    """Return a server of a model with fill-in-the-middle tokens, whose answer is `text`."""
    tokenizer = fim_tokenizer(*QWEN)
    app, engine = make_server(**({"next_token": saying(text)} | settings), tokenizer=tokenizer)
    app.state.quire.engines._front_end = FrontEnd(engine.engine.config, tokenizer, None)
    return app, engine


@pytest.mark.parametrize("then", [EOS, QWEN.index("<|file_sep|>") + 1])
@in_loop
async def test_suffix_fills_in_the_middle_of_each_prompt(then: int) -> None:
    app, engine = filling(next_token=saying("fill", then=then))
    fields = {"prompt": ["ab", "c"], "suffix": "yz", "n": 2, "temperature": 1, "echo": True, "return_token_ids": True}
    answer = (await post(app, PATH, fields)).json()
    Completion.model_validate(answer)
    assert texts(answer) == ["abfill", "abfill", "cfill", "cfill"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert [request.prompt_token_ids for request in engine.submitted] == [
        [1, 97, 98, 2, 121, 122, 3], [1, 99, 2, 121, 122, 3],
    ]  # fmt: skip
    streamed_app, _ = filling(next_token=saying("fill", then=then))
    found = chunks((await post(streamed_app, PATH, fields | {"stream": True})).text)
    assert [streamed(found, index) for index in range(4)] == texts(answer)


@in_loop
async def test_empty_prompt_needs_a_suffix() -> None:
    app, engine = filling()
    assert texts((await post(app, PATH, {"prompt": "", "suffix": "yz"})).json()) == ["fill"]
    assert engine.submitted[0].prompt_token_ids == [1, 2, 121, 122, 3]
    assert_error(await post(app, PATH, {"prompt": "", "suffix": ""}), 400, "invalid_parameter", "prompt")


@pytest.mark.parametrize("suffix", ["", None])
@in_loop
async def test_empty_suffix_continues_the_prompt(suffix: str | None) -> None:
    for app, engine in (filling(), make_server(next_token=saying("fill"))):
        assert texts((await post(app, PATH, {"prompt": "ab", "suffix": suffix})).json()) == ["fill"]
        assert engine.submitted[0].prompt_token_ids == [97, 98]


@in_loop
async def test_cut_prompt_with_suffix_keeps_its_markers_and_the_text_around_the_gap() -> None:
    app, engine = filling()
    fields = {"prompt": "abcdef", "suffix": "uvwxyz", "truncate_prompt_tokens": 11, "echo": True}
    answer = (await post(app, PATH, fields)).json()
    assert engine.submitted[0].prompt_token_ids == [1, *b"abcdef", 2, *b"uv", 3]
    assert texts(answer) == ["abcdeffill"]
    assert answer["usage"]["prompt_tokens_details"]["truncated_tokens"] == 4


@in_loop
async def test_suffix_needs_text_and_a_model_with_markers() -> None:
    app, engine = filling()
    assert_error(await post(app, PATH, {"prompt": [97], "suffix": "b"}), 400, "invalid_parameter", "suffix")
    assert_error(await post(app, PATH, {"prompt": "a" * 500, "suffix": "b"}), 400, "context_length_exceeded")
    many = {"prompt": ["a"] * 5, "suffix": "b" * (MAX_SHARED_CHARACTERS // 4), "truncate_prompt_tokens": 9}
    assert_error(await post(app, PATH, many), 400, "invalid_parameter", "suffix")
    plain, _ = make_server()
    message = assert_error(
        await post(plain, PATH, {"prompt": "a", "suffix": "b"}), 400, "unsupported_parameter", "suffix"
    )
    assert "<|fim_prefix|>" in message
    assert engine.submitted == []


@in_loop
async def test_openai_client_fills_in_the_middle() -> None:
    app, engine = filling()

    def use(url: str) -> tuple[str, str]:
        client = openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0)
        whole = client.completions.create(model=MODEL, prompt="ab", suffix="yz")
        stream = client.completions.create(model=MODEL, prompt="ab", suffix="yz", stream=True)
        return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)

    async with listening(app) as url:
        assert await asyncio.to_thread(use, url) == ("fill", "fill")
    assert {tuple(request.prompt_token_ids) for request in engine.submitted} == {(1, 97, 98, 2, 121, 122, 3)}
