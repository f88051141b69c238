import asyncio

from prometheus_client.parser import text_string_to_metric_families

from quire.server.keys import KeyRing
from tests.server.served import serving


def test_the_page_is_prometheus_and_needs_a_key() -> None:
    async def main() -> None:
        async with serving(keys=KeyRing({"k": None})) as served:
            assert (await served.answer("GET", "/metrics")).status == 401
            answer = await served.answer("GET", "/metrics", headers={"Authorization": "Bearer k"})
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            families = {family.name for family in text_string_to_metric_families(answer.body.decode())}
            assert {"quire_requests_running", "quire_generation_tokens", "process_resident_memory_bytes"} <= families

    asyncio.run(main())
