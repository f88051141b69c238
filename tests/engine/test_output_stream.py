import asyncio
import threading

import pytest

from quire.engine.output_stream import OutputStream, wake_all
from quire.outputs import RequestOutput


def output(text: str, *, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", text, [1], [], finished)


def test_newer_outputs_replace_unread_ones() -> None:
    async def scenario() -> None:
        stream = OutputStream(asyncio.get_running_loop())
        for text in "abc":
            stream.put(output(text))
        stream.wake()
        assert (await stream.next()).prompt == "c"

    asyncio.run(scenario())


def test_the_last_output_is_read_before_an_error() -> None:
    async def scenario() -> None:
        stream = OutputStream(asyncio.get_running_loop())
        stream.put(output("a"))
        stream.fail(ZeroDivisionError())
        stream.wake()
        assert (await stream.next()).prompt == "a"
        with pytest.raises(ZeroDivisionError):
            await stream.next()

    asyncio.run(scenario())


def test_it_has_ended_once_its_end_was_read() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        finished, failed = OutputStream(loop), OutputStream(loop)
        finished.put(output("a", finished=True))
        failed.fail(ZeroDivisionError())
        assert not finished.has_ended
        assert not failed.has_ended
        assert (await finished.next()).finished
        with pytest.raises(ZeroDivisionError):
            await failed.next()
        assert finished.has_ended
        assert failed.has_ended

    asyncio.run(scenario())


def test_a_thread_wakes_a_waiting_reader() -> None:
    async def scenario() -> None:
        stream = OutputStream(asyncio.get_running_loop())

        def work() -> None:
            stream.put(output("a"))
            assert wake_all([stream]) == []

        threading.Timer(0.01, work).start()
        assert (await asyncio.wait_for(stream.next(), 10)).prompt == "a"

    asyncio.run(scenario())


def test_streams_of_closed_loops_are_returned() -> None:
    loop = asyncio.new_event_loop()
    stream = OutputStream(loop)
    loop.close()
    assert wake_all([stream]) == [stream]
