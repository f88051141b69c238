import asyncio
import itertools
import random
import time

import pytest

from quire.engine.async_llm import AsyncLLM
from quire.errors import EngineDeadError, PromptError, RequestError
from quire.sampling_params import SamplingParams
from tests.engine.async_builders import LIMIT_S, Gate, collect, play, played, wait_until
from tests.engine.builders import ScriptedExecutor, assert_all_home, make_engine, saying


@played(saying("hello"))
async def test_outputs_grow_and_the_last_one_is_finished(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    outputs = await collect(llm, "p", SamplingParams(max_tokens=30))
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-1] == "hello"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    (last,) = await collect(llm, "p", SamplingParams(max_tokens=30), streams=False)
    assert last.outputs[0].text == "hello"


@played()
async def test_generator_ends_at_the_deadline_with_abort(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    engine = llm.llm_engine
    real, late_s = engine._clock, [0.0]
    engine._clock = lambda: real() + late_s[0]
    executor.in_step = lambda step: late_s.__setitem__(0, 2000.0 if step >= 4 else 0.0)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    outputs = await collect(llm, "p", params, deadline_s=1000)
    assert (outputs[-1].finished, outputs[-1].outputs[0].finish_reason) == (True, "abort")
    assert 4 <= len(outputs[-1].outputs[0].token_ids) < 60
    messages = [{"role": "user", "content": "hi"}]
    (output,) = [item async for item in llm.chat(messages, params, deadline_s=1000, streams=False)]
    assert output.outputs[0].finish_reason == "abort"
    with pytest.raises(RequestError, match="deadline_s"):
        await collect(llm, "p", deadline_s=0)


@played()
async def test_score_is_the_cosine_of_vectors(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    scores = [output.outputs.score for output in await llm.score("q", ["ab", "q"])]
    assert len(scores) == 2
    assert scores[1] == pytest.approx(1 * 1 + ord("q") ** 2)
    with pytest.raises(RequestError, match="2 queries and 3 documents"):
        await llm.score(["a", "b"], ["c"] * 3)


@played()
async def test_slow_reader_gets_the_latest_output(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    outputs = []
    async for output in llm.generate("p", SamplingParams(max_tokens=40), "r"):
        outputs.append(output)
        await wait_until(lambda: not llm.llm_engine.has_unfinished_requests())
    assert len(outputs) <= 3
    assert len(outputs[-1].outputs[0].token_ids) == 40


@played()
async def test_new_request_ends_the_running_step_early(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    gate = Gate(executor, at_step=2)
    first = asyncio.create_task(collect(llm, "p", SamplingParams(max_tokens=9, ignore_eos=True)))
    await gate.reached()
    assert not executor.ends_early
    second = asyncio.create_task(collect(llm, "q", SamplingParams(max_tokens=9, ignore_eos=True)))
    await wait_until(lambda: len(llm._driver._inbox) >= 1)
    assert executor.ends_early
    await gate.open_after(llm, 1)
    await asyncio.gather(first, second)


@played()
async def test_mistakes_reach_the_caller_who_made_them(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    good = asyncio.create_task(collect(llm, "good", SamplingParams(max_tokens=5), "good"))
    with pytest.raises(PromptError):
        await collect(llm, "")
    assert len((await good)[-1].outputs[0].token_ids) == 5


@pytest.mark.parametrize("way", ["cancel", "abort"])
@played()
async def test_id_may_be_used_again_in_the_step_in_which_its_request_is_aborted(
    llm: AsyncLLM, executor: ScriptedExecutor, way: str
) -> None:
    gate = Gate(executor, at_step=3)
    first = asyncio.create_task(collect(llm, "p", SamplingParams(max_tokens=30), "same"))
    await gate.reached()
    if way == "cancel":
        first.cancel()
    else:
        abort = asyncio.create_task(llm.abort("same"))
    await wait_until(lambda: len(llm._driver._inbox) == 1)
    second = asyncio.create_task(collect(llm, "q", SamplingParams(max_tokens=5), "same"))
    await gate.open_after(llm, 2)
    outputs = await second
    assert {output.prompt for output in outputs} == {"q"}
    assert outputs[-1].outputs[0].finish_reason == "length"
    if way == "abort":
        await abort
        assert (await first)[-1].outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("way", ["break", "cancel", "aclose"])
@played()
async def test_leaving_early_aborts(llm: AsyncLLM, executor: ScriptedExecutor, way: str) -> None:
    gate = Gate(executor, at_step=4)
    if way == "cancel":
        task = asyncio.create_task(collect(llm, "p", SamplingParams(max_tokens=100)))
        await gate.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif way == "break":
        async for _ in llm.generate("p", SamplingParams(max_tokens=100)):
            await gate.reached()
            break
    else:
        stream = llm.generate("p", SamplingParams(max_tokens=100))
        await anext(stream)
        await gate.reached()
        await stream.aclose()
    await gate.open_after(llm, 1)
    await wait_until(lambda: not llm.llm_engine.has_unfinished_requests())
    assert executor.num_steps == 4, "the step that ran was the last"


def test_fifty_requests_with_random_cancels_end_once_each() -> None:
    ends: list[str] = []

    async def follow(llm: AsyncLLM, number: int) -> str:
        params = SamplingParams(n=1 + number % 2, max_tokens=1 + number % 25, seed=number)
        last = None
        async for output in llm.generate(f"prompt {number}", params, f"r{number}"):
            assert last is None or not last.finished, "nothing comes after the end"
            last = output
        assert last is not None
        assert last.finished
        return str(last.outputs[0].finish_reason)

    async def scenario(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
        numbers = random.Random(3)
        executor.in_step = lambda step: time.sleep(0.0003)

        async def one(number: int) -> None:
            await asyncio.sleep(numbers.random() * 0.02)
            task = asyncio.create_task(follow(llm, number))
            if number % 3 == 0:
                await asyncio.sleep(numbers.random() * 0.02)
                task.cancel()
            elif number % 5 == 0:
                await asyncio.sleep(numbers.random() * 0.02)
                await llm.abort(f"r{number}")
            try:
                ends.append(await task)
            except asyncio.CancelledError:
                ends.append("cancelled")

        await asyncio.gather(*(one(number) for number in range(50)))
        await wait_until(lambda: not llm.llm_engine.has_unfinished_requests())

    play(scenario, num_blocks=60, max_num_seqs=8)
    assert len(ends) == 50
    assert set(ends) <= {"length", "cancelled", "abort"}
    assert ends.count("length") >= 25


def test_loop_that_is_gone_ends_its_requests() -> None:
    engine, executor = make_engine()
    gate = Gate(executor, at_step=4)
    llm = AsyncLLM.from_engine(engine)
    loop = asyncio.new_event_loop()
    stream = llm.generate("p", SamplingParams(max_tokens=100))
    loop.run_until_complete(anext(stream))
    loop.run_until_complete(gate.reached())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gate.open()
    until = time.monotonic() + LIMIT_S
    while engine.has_unfinished_requests() and time.monotonic() < until:
        time.sleep(0.001)
    assert executor.num_steps == 4
    llm.shutdown()
    assert_all_home(engine)


@played()
async def test_dead_engine_fails_everyone_with_its_cause(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    def fail(step: int) -> None:
        time.sleep(0.001)
        if step > 5:
            raise ZeroDivisionError("kernel")

    executor.in_step = fail
    assert llm.is_running
    tasks = [asyncio.create_task(collect(llm, "p", SamplingParams(max_tokens=100))) for _ in range(5)]
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    # The engine gives up when the third fails alone.
    dead = [error for error in ended if isinstance(error, EngineDeadError)]
    failed = [outputs[-1].outputs[0] for outputs in ended if not isinstance(outputs, BaseException)]
    assert [completion.finish_reason for completion in failed] == ["error", "error"]
    assert [type(error.__cause__) for error in dead] == [ZeroDivisionError] * 3
    assert llm.errored
    assert not llm.is_running
    assert isinstance(llm.dead_error, EngineDeadError)
    with pytest.raises(EngineDeadError, match="kernel"):
        await llm.check_health()
    with pytest.raises(EngineDeadError, match="kernel"):
        await collect(llm, "p")
    await llm.abort("anything")


@played()
async def test_shutdown_ends_requests_and_refuses_new_ones(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    gate = Gate(executor, at_step=3)
    task = asyncio.create_task(collect(llm, "p", SamplingParams(max_tokens=100)))
    await gate.reached()
    shutdown = asyncio.create_task(asyncio.to_thread(llm.shutdown))
    await wait_until(lambda: not llm.is_running)
    gate.open()
    await shutdown
    assert (await task)[-1].outputs[0].finish_reason == "abort"
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(llm, "p")
    with pytest.raises(EngineDeadError, match="shut down"):
        await llm.check_health()
    assert not llm.is_running


@played()
async def test_abort_of_an_engine_that_ends_meanwhile_does_nothing(
    llm: AsyncLLM, executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(llm.shutdown)
    num_steps = executor.num_steps
    monkeypatch.setattr(AsyncLLM, "is_running", True)  # as it was a moment ago
    await llm.abort("anything")
    assert executor.num_steps == num_steps


@played()
async def test_reset_prefix_cache_waits_for_its_turn(llm: AsyncLLM, executor: ScriptedExecutor) -> None:
    await collect(llm, "a" * 20, SamplingParams(max_tokens=1))
    gate = Gate(executor, at_step=4)
    task = asyncio.create_task(collect(llm, "b" * 20, SamplingParams(max_tokens=50)))
    await gate.reached()
    reset = asyncio.create_task(llm.reset_prefix_cache())
    await gate.open_after(llm, 1)
    assert not await reset
    await task
    assert await llm.reset_prefix_cache()
    assert (await collect(llm, "a" * 20, SamplingParams(max_tokens=1)))[-1].num_cached_tokens == 0
