"""Short versions of the rows L5 and L7 of `python -m benchmarks.soak`."""

import asyncio
import json

import pytest

from benchmarks.soak.attacks import slow_attacks
from quire.engine.process.stream import MAX_UNREAD_LOGPROBS
from tests.server.fake_engine import in_loop
from tests.server.served import CHAT, Served, chat_body, dechunked, quick, serving

WIDE = {"logprobs": True, "top_logprobs": 20}
ROOMY = {"max_model_len": 2048, "num_blocks": 2000}


async def read_late(served: Served, num_tokens: int, **fields: object) -> list[str]:
    """Return the events of a stream whose client reads nothing until the engine has finished."""
    body = json.dumps(chat_body(max_tokens=num_tokens, ignore_eos=True, stream=True, **fields)).encode()
    reader, writer = await served.connect()
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    for _ in range(2000):
        await asyncio.sleep(0.01)
        client = served.supervisor.the_client
        if client.engine.scheduler.num_running == 0 and served.executor.num_steps and not client.num_requests:
            break
    reader._transport.resume_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        data = await reader.read(-1)
    writer.close()
    events = dechunked(data.partition(b"\r\n\r\n")[2]).decode().split("\n\n")
    return [event.removeprefix("data: ") for event in events if event]


def token_count(events: list[str]) -> int:
    choices = [choice for event in events[:-1] for choice in json.loads(event).get("choices") or ()]
    return sum(len(choice.get("token_ids") or ()) for choice in choices)


@pytest.mark.parametrize("fields", [{}, WIDE], ids=["text", "logprobs"])
@in_loop
async def test_late_reader_gets_the_whole_stream(fields: dict[str, object]) -> None:
    num_tokens = 100 if fields else 900
    async with serving(scheduler=ROOMY) as served:
        events = await read_late(served, num_tokens, return_token_ids=True, **fields)
        assert events[-1] == "[DONE]"
        assert token_count(events) == num_tokens


@in_loop
async def test_reader_with_too_many_unread_logprobs_gets_them_and_an_error() -> None:
    async with serving(scheduler=ROOMY) as served:
        events = await read_late(served, 1900, return_token_ids=True, **WIDE)
        error = json.loads(events[-2])["error"]
        assert error["code"] == "reader_too_slow"
        assert str(MAX_UNREAD_LOGPROBS) in error["message"]
        assert 100 < token_count(events[:-2] + events[-1:]) < 1900
        await served.until_idle()
        assert (await served.chat()).status == 200


@in_loop
async def test_slow_attackers_are_disconnected_while_others_are_served() -> None:
    async with serving(
        connection=quick(READ_TIMEOUT_S=0.5, TAKE_TIMEOUT_S=1.0, KEEP_ALIVE_S=1, LINGER_S=0.2),
        scheduler=ROOMY,
        served_model_name="soak",
    ) as served:
        row = await slow_attacks(
            f"http://127.0.0.1:{served.port}", count=20, duration_s=3.0, every_s=0.1, limit_s=2.5,
            max_tokens=8,
        )  # fmt: skip
        assert row.passes, row.cells()
        await served.until_idle()
