import asyncio

from tests.server.served import serving


def test_new_work_is_sent_away_and_watchers_are_answered() -> None:
    async def main() -> None:
        async with serving() as served:
            assert (await served.chat()).status == 200
            served.state.is_draining = True
            answer = await served.chat()
            assert (answer.status, answer.code) == (503, "draining")
            assert answer.headers["retry-after"] == "30"
            assert answer.headers["connection"] == "close"
            assert (await served.answer("GET", "/health/live")).status == 200
            assert (await served.answer("GET", "/health/ready")).status == 503
            assert (await served.answer("GET", "/metrics")).status == 200

    asyncio.run(main())
