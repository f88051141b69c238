import dataclasses
import math
from typing import Any

import pytest

from quire.server.protocol.scores import ClassifyAnswer, RerankAnswer, ScoreList
from quire.server.routes.exchange import MAX_SHARED_CHARACTERS
from tests.server.fake_engine import MODEL, FakeEngine, assert_error, in_loop, make_server, post, requests_to

SCORE, RERANK, CLASSIFY = "/v1/score", "/v1/rerank", "/classify"


def with_model(**changes: Any) -> FakeEngine:
    """Return an engine whose model has these fields. The scripted vector is (number of tokens, last token)."""
    engine = FakeEngine()
    config = engine.engine.config
    engine.engine.input_processor._config = engine.engine.config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, **changes)
    )
    return engine


@pytest.mark.parametrize("path", ["/score", SCORE])
@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("text_1", "text_2"), ("queries", "items"), ("data_1", "data_2")]
)
@in_loop
async def test_score_of_embeddings_is_their_product(path: str, names: tuple[str, str]) -> None:
    app, engine = make_server()
    async with requests_to(app) as client:
        body = {"model": MODEL, names[0]: "ab", names[1]: ["c", "ab"]}
        answer = (await client.post(path, json=body)).json()
        single = (await client.post(path, json={names[0]: ["ab"], names[1]: "c"})).json()
    ScoreList.model_validate(answer)
    assert [item["score"] for item in answer["data"]] == [2 * 1 + 98 * 99, 2 * 2 + 98 * 98]
    assert answer["usage"]["prompt_tokens"] == 3  # equal texts are computed once
    assert single["data"][0]["score"] == answer["data"][0]["score"]
    assert all(request.pooling is not None and request.pooling.normalize for request in engine.submitted)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_1": "q"}, "documents is required, which may also be named text_2, items, data_2"),
        ({"documents": "d"}, "queries is required, which may also be named text_1, data_1"),
        ({"text_1": "q", "text_2": "d", "use_activation": False}, "use_activation must be true, got false"),
    ],
)
@in_loop
async def test_wrong_body_says_how_fields_are_named(body: dict[str, Any], message: str) -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        answer = await client.post(SCORE, json={"use_activation": True, **body})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize("limit", [{"truncate_prompt_tokens": 2}, {"max_tokens_per_doc": 2}])
@in_loop
async def test_long_documents_are_cut_off_at_the_end(limit: dict[str, int]) -> None:
    app, engine = make_server()
    async with requests_to(app) as client:
        score = await client.post(SCORE, json={"queries": "q", "documents": "abc", **limit})
        await client.post(RERANK, json={"query": "q", "documents": ["abc"], **limit})
        assert_error(
            await client.post(SCORE, json={"queries": "q", "documents": "b", "truncate_prompt_tokens": 0}), 400,
            "invalid_parameter", "truncate_prompt_tokens",
        )  # fmt: skip
    assert score.json()["data"][0]["score"] == 1 * 2 + 113 * 98
    assert [len(request.prompt_token_ids) for request in engine.submitted] == [1, 2, 1, 2]


@pytest.mark.parametrize("path", ["/rerank", RERANK, "/v2/rerank"])
@in_loop
async def test_rerank_returns_the_best_first(path: str) -> None:
    app, _ = make_server()
    body: dict[str, Any] = {"query": "q", "documents": ["b", {"text": "d"}, "c"]}
    async with requests_to(app) as client:
        answer = (await client.post(path, json=body)).json()
        short = (await client.post(path, json={**body, "top_n": 1, "return_documents": False})).json()
    RerankAnswer.model_validate(answer)
    assert [(item["index"], item["document"]["text"]) for item in answer["results"]] == [(1, "d"), (2, "c"), (0, "b")]
    assert [set(item) for item in short["results"]] == [{"index", "relevance_score"}]


@in_loop
async def test_classification_head_gives_probabilities_and_scores() -> None:
    app, engine = make_server(with_model(labels=("bad", "good")))
    async with requests_to(app) as client:
        answer = (await client.post(CLASSIFY, json={"input": ["ab", "a"]})).json()
        assert_error(await client.post(SCORE, json={"queries": "a", "documents": "b"}), 400, "invalid_request")
        assert_error(await client.post("/v1/completions", json={"prompt": "a"}), 400, "invalid_request")
    ClassifyAnswer.model_validate(answer)
    assert [item["label"] for item in answer["data"]] == ["good", "good"]
    assert answer["data"][0]["probs"] == pytest.approx([math.exp(2 - 98), 1.0])
    assert {request.pooling.task for request in engine.submitted if request.pooling} == {"classify"}


@in_loop
async def test_model_that_says_yes_or_no_is_asked_for_both_logits() -> None:
    app, engine = make_server(with_model(label_tokens=("n", "y")))
    async with requests_to(app) as client:
        answer = await client.post(SCORE, json={"queries": "<|im_start|>a", "documents": "b"})
    assert answer.json()["data"][0]["score"] == pytest.approx(1 / (1 + math.exp(14 - 98)))
    (request,) = engine.submitted
    assert request.pooling is not None
    assert (request.pooling.task, request.pooling.token_ids) == ("token_logits", (ord("n"), ord("y")))


@pytest.mark.parametrize("settings", [{"labels": ("one",)}, {"label_tokens": ("n", "y")}])
@in_loop
async def test_long_query_of_many_pairs_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    app, _ = make_server(with_model(**settings))
    tokenizer = app.state.quire.engines.front_end.tokenizer
    for name in ("encode", "encode_pair"):
        monkeypatch.setattr(tokenizer, name, lambda *args, **kwargs: pytest.fail("tokenised"))
    body = {"query": "a" * (MAX_SHARED_CHARACTERS // 8), "documents": ["a"] * 9}
    message = assert_error(await post(app, RERANK, body), 400, "invalid_parameter", "query")
    assert "send at most 8 at once" in message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (SCORE, {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, None),
        (SCORE, {"queries": "a"}, "documents"),
        (SCORE, {"queries": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": [3]}, "documents"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        (CLASSIFY, {"input": "a"}, "task"),
    ],
)
@in_loop
async def test_bad_requests_are_refused(path: str, body: dict[str, Any], param: str | None) -> None:
    app, engine = make_server()
    async with requests_to(app) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert (response.json()["error"]["param"] or "").startswith(param or "")
    assert engine.submitted == []
