import asyncio
import tracemalloc

import pytest

from quire.engine.process import stream as module
from quire.engine.process.messages import RequestUpdate
from quire.engine.process.stream import MAX_UNREAD_BYTES, RequestStream
from quire.errors import EngineDeadError, UnreadError
from quire.outputs import CompletionOutput, Logprob
from tests.server.fake_engine import in_loop


def update(index: int, *, num_top: int = 0, finished: bool = False) -> RequestUpdate:
    """Return the update with token `index` of an answer."""
    logprobs = [{index + k: Logprob(-0.5 * k, k + 1, f"token {k}") for k in range(num_top + 1)}] if num_top else None
    reason = "length" if finished else None
    return RequestUpdate("r", [CompletionOutput(0, f"<{index}>", [index], None, logprobs, reason)], finished=finished)


async def read(stream: RequestStream, into: list[RequestUpdate] | None = None) -> list[RequestUpdate]:
    """Read to the end; updates before an error are in `into`."""
    found: list[RequestUpdate] = [] if into is None else into
    async with asyncio.timeout(20):
        async for item in stream:
            found.append(item)
    return found


@in_loop
async def test_unread_text_is_merged_without_loss() -> None:
    stream = RequestStream("r")
    for index in range(2_000):
        stream.put(update(index, finished=index == 1_999))
    (only,) = await read(stream)
    assert only.choices[0].text == "".join(f"<{index}>" for index in range(2_000))
    assert only.choices[0].token_ids == list(range(2_000))
    assert only.finished


@pytest.mark.parametrize("num_read_first", [0, 1, 7])
@in_loop
async def test_unread_logprobs_are_merged_in_order(num_read_first: int) -> None:
    stream = RequestStream("r")
    updates = aiter(stream)
    sent = [update(index, num_top=5) for index in range(100)] + [update(100, finished=True)]
    seen = []
    for item in sent[:num_read_first]:
        stream.put(item)
        seen.append(await anext(updates))
    for item in sent[num_read_first:]:
        stream.put(item)
    seen += [item async for item in updates]
    choices = [choice for item in seen for choice in item.choices]
    assert [token_id for choice in choices for token_id in choice.token_ids] == list(range(101))
    logprobs = [position for choice in choices for position in choice.logprobs or []]
    assert logprobs == [position for item in sent for position in item.choices[0].logprobs or []]
    assert [item.finished for item in seen] == [False] * num_read_first + [True]


@pytest.mark.parametrize(("num_top", "most"), [(0, 24), (5, 200), (20, 600)])
@in_loop
async def test_reader_that_leaves_too_much_unread_gets_it_and_then_an_error(num_top: int, most: int) -> None:
    stream = RequestStream("r")
    num_put = 0
    while not stream.is_cut:
        stream.put(update(num_put, num_top=num_top))
        num_put += 1
    assert MAX_UNREAD_BYTES / most < num_put < MAX_UNREAD_BYTES / (4 + 8 * num_top)
    stream.put(update(num_put, num_top=20))
    seen: list[RequestUpdate] = []
    with pytest.raises(UnreadError, match=str(MAX_UNREAD_BYTES)):
        await read(stream, seen)
    assert [token_id for item in seen for token_id in item.choices[0].token_ids] == list(range(num_put))
    assert stream.has_ended


@in_loop
async def test_memory_of_unread_updates_is_bounded() -> None:
    updates = [update(index, num_top=5) for index in range(1000)]
    streams = [RequestStream("r") for _ in range(10)]
    tracemalloc.start()
    for stream in streams:
        for item in updates:
            stream.put(item)
    used = tracemalloc.get_traced_memory()[0] / len(streams)
    tracemalloc.stop()
    assert all(stream.is_cut for stream in streams)
    assert MAX_UNREAD_BYTES / 2 < used < 1.1 * MAX_UNREAD_BYTES


@in_loop
async def test_prompt_logprobs_are_not_what_a_reader_leaves_unread() -> None:
    stream = RequestStream("r")
    of_prompt = [None, *({k: Logprob(-k, k, "x" * 10) for k in range(20)} for _ in range(1000))]
    first = update(0)
    first.prompt_logprobs = of_prompt
    stream.put(first)
    for index in range(1, 200):
        stream.put(update(index, finished=index == 199))
    (only,) = await read(stream)
    assert only.prompt_logprobs == of_prompt
    assert only.choices[0].token_ids == list(range(200))


def test_finished_answer_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 20)

    async def main() -> None:
        stream = RequestStream("r")
        stream.put(update(0, num_top=5))
        stream.put(update(1, num_top=20, finished=True))
        assert not stream.is_cut
        assert (await read(stream))[-1].finished

    asyncio.run(main())


@in_loop
async def test_unread_updates_come_before_the_engines_death() -> None:
    stream = RequestStream("r")
    for index in range(3):
        stream.put(update(index, num_top=2))
    stream.fail(EngineDeadError("gone"))
    seen: list[RequestUpdate] = []
    with pytest.raises(EngineDeadError):
        await read(stream, seen)
    assert [token_id for item in seen for token_id in item.choices[0].token_ids] == [0, 1, 2]
