"""Outputs as the engine's process sends them: each has what is new."""

from quire.engine.process.child import update_of
from quire.engine.process.messages import RequestUpdate
from quire.engine.process.stream import merge
from quire.outputs import RequestOutput
from quire.sampling_params import PoolingParams, SamplingParams
from tests.engine.builders import add_with_news, make_engine, run, saying


def updates_and_last(params: SamplingParams) -> tuple[list[RequestUpdate], RequestOutput]:
    """Return the messages of a request, and the last output of one like it that has all text so far."""
    engine, _ = make_engine(next_token=saying("Grüße, World"))
    add_with_news(engine, "r", "hello", params)
    updates = [update_of(output) for output in run(engine)]
    engine.add_request("r", "hello", params)
    last = run(engine)[-1]
    assert isinstance(last, RequestOutput)
    return updates, last


def test_merged_updates_say_the_same() -> None:
    updates, last = updates_and_last(SamplingParams(temperature=1, seed=1, n=2, logprobs=2, max_tokens=50))
    whole = updates[0]
    for update in updates[1:]:
        whole = merge(whole, update)
    assert whole.finished
    assert whole.metrics == updates[-1].metrics
    for choice, completion in zip(whole.choices, last.outputs, strict=True):
        assert (choice.text, choice.token_ids, choice.logprobs, choice.finish_reason) == (
            completion.text, completion.token_ids, completion.logprobs, completion.finish_reason,
        )  # fmt: skip


def test_embeddings_and_their_errors() -> None:
    engine, executor = make_engine()
    executor.errors["bad"] = "NaN in the prompt"
    for request_id in ("good", "bad"):
        engine.add_request(request_id, "hello", PoolingParams())
    updates = {output.request_id: update_of(output) for output in run(engine)}
    assert updates["good"].embedding
    assert updates["good"].finished
    assert updates["bad"].embedding is None
    assert "NaN" in updates["bad"].failure.message


def test_prompts_log_probabilities_come_once_and_first() -> None:
    updates, last = updates_and_last(SamplingParams(prompt_logprobs=1, max_tokens=5))
    assert last.prompt_logprobs is not None
    assert [update.prompt_logprobs for update in updates] == [last.prompt_logprobs] + [None] * (len(updates) - 1)
    assert None not in last.prompt_logprobs[1:]
    assert merge(updates[0], updates[1]).prompt_logprobs == last.prompt_logprobs
