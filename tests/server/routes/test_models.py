from quire.server.protocol.answers import ModelCard, ModelList
from tests.server.fake_engine import MODEL, assert_error, in_loop, make_server, requests_to


@in_loop
async def test_the_model_and_no_other() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get(f"/v1/models/{MODEL}")).json()
        assert_error(await client.get("/v1/models/some/other"), 404, "model_not_found", "model")
    assert ModelList.model_validate(listed).data == [ModelCard.model_validate(one)]
    assert (one["id"], one["max_model_len"]) == (MODEL, 128)
