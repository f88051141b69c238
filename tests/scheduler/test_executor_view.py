"""The executor is told everything once, and nothing that it need not know."""

from quire.sampling_params import SamplingParams
from tests.scheduler.builders import Driver, make_config, make_request


def test_new_request_comes_whole_and_its_own_tokens_are_not_sent_back() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    request = make_request("a", 10, 3, seed=9, eos_token_ids=frozenset({5, 3}), bad_words_token_ids=((1, 2),))
    request.sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    driver.add(request)
    driver.run()
    (new,) = driver.outputs[0].new_requests
    assert new.token_ids == tuple(request.prompt_token_ids)
    assert (new.num_prompt_tokens, new.seed, new.eos_token_ids) == (10, 9, (3, 5))
    assert (new.sampling, new.bad_words_token_ids) == (request.sampling, ((1, 2),))
    assert (new.max_tokens, new.awaits_external_token) == (3, False)
    assert {item.new_token_ids for output in driver.outputs for item in output.scheduled} == {()}


def test_requests_the_executor_never_saw_are_not_forgotten() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(make_request("a", 4, 3), make_request("never", 4, 3))
    driver.step()
    driver.scheduler.abort(["never"])
    driver.run()
    driver.add(make_request("b"))
    driver.run()
    assert [name for output in driver.outputs for name in output.finished_ids] == ["a"]
    assert driver.executor.known_ids == {"b"}


def test_news_waits_for_a_step_that_computes() -> None:
    driver = Driver(make_config())
    driver.add(make_request("a", 4, 3))
    driver.step()
    driver.scheduler.abort(["a"])
    empty = driver.scheduler.schedule()
    assert (empty.scheduled, empty.finished_ids) == ((), ())
    driver.add(make_request("a", 6, 1))
    driver.step()
    assert driver.outputs[-1].finished_ids == ("a",)
    assert [new.request_id for new in driver.outputs[-1].new_requests] == ["a"]
