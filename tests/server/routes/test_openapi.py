import json

from quire.server.openapi import build_document
from tests.server.fake_engine import in_loop, make_server, requests_to


@in_loop
async def test_the_description_is_served() -> None:
    app, _ = make_server()
    async with requests_to(app) as client:
        served = (await client.get("/openapi.json")).json()
    assert served == json.loads(json.dumps(build_document()))
