import struct
from base64 import b64decode
from typing import Any

import pytest

from quire.server.protocol.fields import MAX_PROMPTS
from quire.server.protocol.prompts import EmbeddingList
from tests.server.fake_engine import MODEL, assert_error, in_loop, make_server, post, requests_to

PATH = "/v1/embeddings"


@pytest.mark.parametrize("texts", [["ab", "xyz"], [[97, 98], [120, 121, 122]]])
@in_loop
async def test_one_vector_per_input_in_order(texts: Any) -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        answer = (await client.post(PATH, json={"model": MODEL, "input": texts})).json()
        alone = (await client.post(PATH, json={"model": MODEL, "input": texts[1]})).json()
    EmbeddingList.model_validate(answer)
    # The scripted executor's vector is (number of tokens, last token).
    assert [item["embedding"] for item in answer["data"]] == [[2.0, 98.0], [3.0, 122.0]]
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert alone["data"][0]["embedding"] == [3.0, 122.0]


@pytest.mark.parametrize("num", [512, 513, MAX_PROMPTS])
@in_loop
async def test_inputs_beyond_the_queue_are_computed_a_batch_at_a_time(num: int) -> None:
    app, engine = make_server(num_blocks=2000)
    admission = app.state.quire.admission
    most = admission.num_at_once(num, 1)
    seen: set[int] = set()
    engine.executor.in_step = lambda step: seen.update({engine.num_requests, admission.num_requests})
    response = await post(app, PATH, {"model": MODEL, "input": [[index % 200] for index in range(num)]})
    assert response.status_code == 200, response.text
    assert [item["embedding"][1] for item in response.json()["data"]] == [index % 200 for index in range(num)]
    assert max(seen) == most < num
    assert (admission.num_requests, engine.num_requests) == (0, 0)


@in_loop
async def test_dimensions_keep_the_first_numbers_normalised_again() -> None:
    app, engine = make_server()
    async with requests_to(app) as client:
        body = {"model": MODEL, "input": "ab"}  # its vector is (2, 98)

        async def vector(**fields: Any) -> list[float]:
            response = await client.post(PATH, json={**body, **fields})
            assert response.status_code == 200, response.text
            found: list[float] = response.json()["data"][0]["embedding"]
            return found

        assert await vector(dimensions=1) == [1.0]
        assert await vector(dimensions=1, normalize=False) == [2.0]
        assert await vector(dimensions=8, normalize=False) == [2.0, 98.0]
        assert await vector(dimensions=1, use_activation=False) == [2.0]
        response = await client.post(PATH, json={**body, "dimensions": 9})
        assert "at most 8" in assert_error(response, 400, "invalid_parameter", "dimensions")
        packed = {**body, "dimensions": 1, "encoding_format": "base64"}
        answer = (await client.post(PATH, json=packed)).json()["data"][0]["embedding"]
    assert struct.unpack("<f", b64decode(answer)) == (1.0,)
    assert [request.pooling is not None and request.pooling.normalize for request in engine.submitted[:4]] == [
        True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(("side", "last"), [(None, "b"), ("right", "b"), ("left", "f")])
@in_loop
async def test_truncation_keeps_the_start_of_a_text_unless_side_is_left(side: str | None, last: str) -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        body = {"input": "abcdef", "truncate_prompt_tokens": 2, "truncation_side": side}
        answer = (await client.post(PATH, json=body)).json()
    assert answer["data"][0]["embedding"] == [2.0, ord(last)]


@in_loop
async def test_prompt_that_fails_is_a_500() -> None:
    app, engine = make_server()
    engine.executor.in_step = lambda step: engine.executor.errors.update({engine.submitted[0].request_id: "broken"})
    response = await post(app, PATH, {"model": MODEL, "input": ["a", "b"]})
    assert_error(response, 500, "engine_error")
