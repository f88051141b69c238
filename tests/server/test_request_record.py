import asyncio

from quire.server.request_record import RequestRecord, current_record, set_current_record


def test_each_task_finds_the_record_of_its_request() -> None:
    async def work(name: str) -> str:
        set_current_record(RequestRecord(name, "GET", "/"))
        await asyncio.sleep(0)
        record = await asyncio.create_task(inner())
        assert record is not None
        return record.request_id

    async def inner() -> RequestRecord | None:
        return current_record()

    async def main() -> None:
        names = [f"r{number}" for number in range(20)]
        assert await asyncio.gather(*map(work, names)) == names

    asyncio.run(main())
    assert current_record() is None
