"""A request ends alone if its result is an error: the engine and all other requests go on."""

from quire.engine.beam_search import BeamSearch
from quire.engine.llm import LLM
from quire.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.builders import (
    ScriptedExecutor,
    assert_all_home,
    finals,
    make_engine,
    run,
)

TEN = SamplingParams(temperature=1.0, max_tokens=10, seed=3)


def fail_at(executor: ScriptedExecutor, step: int, request_id: str) -> None:
    """From this step on the request gets an error instead of a token."""

    def in_step(current: int) -> None:
        if current == step:
            executor.errors[request_id] = "no token"

    executor.in_step = in_step


def test_one_of_several_completions() -> None:
    engine, executor = make_engine()
    fail_at(executor, 3, "many/1")
    engine.add_request("many", "hello", SamplingParams(n=3, max_tokens=6, seed=1))
    output = finals(run(engine))["many"]
    assert [completion.finish_reason for completion in output.outputs] == ["length", "error", "length"]
    assert [len(completion.token_ids) for completion in output.outputs] == [6, 2, 6]
    assert_all_home(engine)


def test_what_it_computed_is_not_found_by_others() -> None:
    engine, executor = make_engine()
    fail_at(executor, 8, "bad")
    prompt = list(range(20))
    engine.add_request("bad", prompt, TEN)
    run(engine)
    engine.add_request("next", prompt, TEN)
    assert finals(run(engine))["next"].num_cached_tokens == 0
    engine.add_request("after that", prompt, TEN)
    assert finals(run(engine))["after that"].num_cached_tokens == 16


def test_a_beam() -> None:
    engine, executor = make_engine()
    fail_at(executor, 2, "beams-0/beam-0")
    llm = LLM.from_engine(engine)
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    failed, whole = llm.beam_search(["hello", "other"], params)
    assert {sequence.finish_reason for sequence in failed.sequences} == {"error"}
    assert {sequence.finish_reason for sequence in whole.sequences} == {"length"}
    assert_all_home(engine)


def test_beam_that_never_had_a_token() -> None:
    engine, executor = make_engine()
    executor.errors["first/beam-0"] = "no token"
    search = BeamSearch(engine, "first", "hello", BeamSearchParams(beam_width=2, max_tokens=6))
    search.start()
    engine.step()
    search.advance()
    assert search.output is not None
    assert [(item.token_ids, item.finish_reason) for item in search.output.sequences] == [([], "error")]
    assert_all_home(engine)
