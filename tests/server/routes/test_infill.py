"""`/infill`, whole and as a stream, with requests as llama.cpp's plugins for editors send them."""

import json
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from quire.server.front_end import FrontEnd
from quire.server.protocol.prompts import InfillAnswer
from quire.server.routes import infill
from quire.text.tokenizer import Tokenizer
from tests.engine.builders import saying
from tests.server.fake_engine import FakeEngine, assert_error, events, in_loop, make_server, post
from tests.text.infill_cases import QWEN, fim_tokenizer

PATH = "/infill"
PRE, SUF, MID, REPO, FILE, END = range(1, 7)
EDITOR = {
    "input_prefix": "def f():\n", "input_suffix": "\nf()\n", "prompt": "    ", "n_predict": 8, "n_indent": 4,
    "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "id_slot": 0,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}],
}  # fmt: skip
WARM_UP = {
    "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": [], "cache_prompt": True,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 1, "input_extra": [{"text": "x = 1\n", "filename": "a.py"}],
}  # fmt: skip


def filling(
    text: str = "return 1", *, tokenizer: Tokenizer | None = None, **settings: Any
) -> tuple[Starlette, FakeEngine]:
    """Return a server of a model with fill-in-the-middle tokens, whose answer is `text`."""
    tokenizer = tokenizer or fim_tokenizer(*QWEN)
    app, engine = make_server(**({"next_token": saying(text)} | settings), tokenizer=tokenizer)
    app.state.quire.engines._front_end = FrontEnd(engine.engine.config, tokenizer, None)
    return app, engine


async def ask(fields: dict[str, Any], *args: Any, **settings: Any) -> tuple[dict[str, Any], FakeEngine]:
    """Return a good answer, checked against its schema, and the engine."""
    app, engine = filling(*args, **settings)
    response = await post(app, PATH, fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    InfillAnswer.model_validate(answer)
    assert engine.num_requests == 0
    return answer, engine


def parts(response: httpx2.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert "[DONE]" not in response.text
    return [json.loads(data) for _, data in events(response.text)]


@in_loop
async def test_editors_request_is_filled_in() -> None:
    answer, engine = await ask(EDITOR)
    text = engine.engine.input_processor._tokenizer.decode(
        engine.submitted[0].prompt_token_ids, skip_special_tokens=False
    )
    assert text == (
        "<|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n<|file_sep|>current\n"
        "<|fim_prefix|>def f():\n    <|fim_suffix|>\nf()\n<|fim_middle|>"
    )
    timings = answer.pop("timings")
    assert answer == {
        "index": 0, "content": "return 1", "stop": True, "model": "tiny", "tokens_predicted": 8,
        "tokens_evaluated": engine.submitted[0].num_prompt_tokens, "tokens_cached": 0, "truncated": False,
        "stop_type": "limit", "stopping_word": "",
    }  # fmt: skip
    assert (timings["predicted_n"], timings["prompt_n"]) == (8, answer["tokens_evaluated"])


@pytest.mark.parametrize("then", [256, MID, FILE, END])
@in_loop
async def test_markers_and_eos_end_the_text(then: int) -> None:
    answer, _ = await ask({"input_prefix": "a", "input_suffix": "b"}, next_token=saying("fill", then=then))
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("fill", "eos", "")


@in_loop
async def test_stop_string_is_named() -> None:
    answer, _ = await ask({"input_prefix": "a", "input_suffix": "b", "stop": ["\n\n"]}, "one\n\ntwo")
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("one", "word", "\n\n")


@pytest.mark.parametrize(
    "ending", [{}, {"stop": "n 1"}, {"n_predict": 3}, {"response_fields": ["stop", "content"]}], ids=str
)
@in_loop
async def test_stream_says_the_same_as_the_whole_answer(ending: dict[str, Any]) -> None:
    fields = {"input_prefix": "a", "input_suffix": "b", **ending}
    whole, _ = await ask(fields, "retürn 1")
    app, _ = filling("retürn 1")
    *pieces, last = parts(await post(app, PATH, fields | {"stream": True}))
    assert all(piece["stop"] is False and piece["content"] for piece in pieces)
    assert len(pieces) > 1
    assert "".join(piece["content"] for piece in pieces) == whole.pop("content")
    assert last.pop("content") == ""
    for answer in (whole, last):
        answer.pop("timings", None)
    assert last == whole


@in_loop
async def test_warm_up_computes_the_prompt_and_generates_nothing() -> None:
    app, _ = filling(max_num_batched_tokens=128)
    first = (await post(app, PATH, WARM_UP)).json()
    assert (first["content"], first["tokens_predicted"], first["stop_type"]) == ("", 0, "limit")
    second = (await post(app, PATH, WARM_UP | {"input_prefix": "x", "n_predict": 2})).json()
    assert second["tokens_cached"] > len("repository\na.py\nx = 1\n")
    *none, last = parts(await post(app, PATH, WARM_UP | {"stream": True}))
    assert (none, last["content"], last["stop"]) == ([], "", True)


@in_loop
async def test_only_wanted_fields_are_sent() -> None:
    wanted = ["content", "timings/prompt_n", "truncated", "nothing", "content/deeper"]
    answer, _ = await ask({"input_prefix": "a", "input_suffix": "b", "response_fields": wanted})
    assert answer == {"content": "return 1", "timings/prompt_n": 5, "truncated": False}


@in_loop
async def test_long_texts_are_cut_around_the_gap() -> None:
    """The context is 128 tokens, 28 of them for the answer."""
    fields = {"input_prefix": "p" * 300 + "P", "input_suffix": "S" + "s" * 300, "n_predict": 28}
    answer, engine = await ask(fields | {"input_extra": [{"filename": "f", "text": "t"}]})
    ids = engine.submitted[0].prompt_token_ids
    assert (answer["truncated"], len(ids), answer["tokens_evaluated"]) == (True, 100, 100)
    assert (ids[0], ids[-1]) == (PRE, MID)
    at = ids.index(SUF)
    assert (ids[at - 1], ids[at + 1], at) == (ord("P"), ord("S"), 74)


@pytest.mark.parametrize("n_predict", [None, -1, -2, 10_000])
@in_loop
async def test_text_may_fill_the_context_without_a_limit(n_predict: int | None) -> None:
    fields = {"input_prefix": "p" * 300, "input_suffix": "", "n_predict": n_predict}
    answer, _ = await ask(fields, "x" * 300)
    assert (answer["tokens_evaluated"], answer["tokens_predicted"], answer["stop_type"]) == (64, 64, "limit")


@pytest.mark.parametrize("streams", [False, True])
@in_loop
async def test_late_answer_ends_after_its_first_line(streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(infill, "monotonic", lambda: float(next(now)))
    app, engine = filling("one\n" + "x" * 60)
    fields = {"input_prefix": "a", "input_suffix": "b", "t_max_predict_ms": 1, "stream": streams}
    response = await post(app, PATH, fields)
    if streams:
        *pieces, answer = parts(response)
        content = "".join(piece["content"] for piece in pieces)
    else:
        answer = response.json()
        content = answer["content"]
    assert content.startswith("one\n")
    assert len(content) < 20
    assert (answer["stop"], answer["stop_type"]) == (True, "limit")
    assert engine.aborted == [engine.submitted[0].request_id]
    assert engine.num_requests == 0


@in_loop
async def test_names_of_llama_cpp_reach_the_sampler() -> None:
    fields = {"input_prefix": "a", "input_suffix": "b", "max_tokens": 5, "repeat_penalty": 1.5, "seed": -1, "top_k": 7}
    _, engine = await ask(fields)
    params = engine.submitted[0].sampling
    assert params is not None
    assert (params.max_tokens, params.repetition_penalty, params.seed, params.top_k) == (5, 1.5, None, 7)
    assert params.temperature == 0.5, "the model's recommendation"
    _, engine = await ask({"input_prefix": "a", "input_suffix": "b", "structured_outputs": {"regex": "[a-z]+"}})
    params = engine.submitted[0].sampling
    assert params is not None
    assert params.structured_outputs is not None
    _, engine = await ask({"input_prefix": "a", "input_suffix": "b", "ignore_eos": True, "n_predict": 2})
    params = engine.submitted[0].sampling
    assert params is not None
    assert params.stop_token_ids == ()


@in_loop
async def test_model_without_markers_is_a_400_that_says_what_was_looked_for() -> None:
    app, engine = make_server()
    message = assert_error(await post(app, PATH, EDITOR), 400, "unsupported_parameter", "input_suffix")
    assert "<|fim_prefix|>" in message
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input_suffix": None}, "invalid_parameter", "input_suffix"),
        ({"n_predict": -3}, "invalid_parameter", "n_predict"),
        ({"input_extra": [{"filename": "f"}]}, "invalid_parameter", "input_extra.0.text"),
        ({"mirostat": 1}, "invalid_parameter", "mirostat"),
        ({"penalize_nl": True}, "unknown_parameter", "penalize_nl"),
    ],
    ids=str,
)
@in_loop
async def test_wrong_request_names_its_field(fields: dict[str, Any], code: str, param: str) -> None:
    app, _ = filling()
    assert_error(await post(app, PATH, {"input_prefix": "a", "input_suffix": "b", **fields}), 400, code, param)


@in_loop
async def test_failure_in_a_stream_is_its_last_event() -> None:
    app, engine = filling("x" * 50)
    engine.executor.in_step = lambda step: engine.executor.errors.update(
        {engine.submitted[0].request_id: "broken"} if step == 3 else {}
    )
    *pieces, last = parts(await post(app, PATH, {"input_prefix": "a", "input_suffix": "b", "stream": True}))
    assert pieces
    assert last["error"]["message"] == "broken"
