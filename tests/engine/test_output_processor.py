import math

import pytest

from quire.sampling_params import SamplingParams
from tests.engine.builders import VOCAB_SIZE, assert_all_home, finals, make_engine, mixing, run, saying


def following(known: list[int]) -> list[float]:
    """Likeliest is the byte after the last one; each token further on is half as likely."""
    total = sum(0.5**rank for rank in range(VOCAB_SIZE))
    return [math.log(0.5 ** ((token_id - known[-1] - 1) % VOCAB_SIZE) / total) for token_id in range(VOCAB_SIZE)]


def test_a_stop_string_across_tokens_ends_the_request() -> None:
    engine, _ = make_engine(saying("one STOP two"))
    engine.add_request("a", "p", SamplingParams(stop=["STOP"], max_tokens=50))
    outputs = run(engine)
    last = finals(outputs)["a"].outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == ("one ", "stop", "STOP")
    assert last.token_ids == list(b"one STOP")
    assert all("S" not in output.outputs[0].text for output in outputs)
    assert len(outputs) == 8, "no step is computed after the match"
    assert_all_home(engine)


def test_logprobs_of_generated_tokens() -> None:
    engine, _ = make_engine(saying("bcx"), following)
    engine.add_request("a", "a", SamplingParams(logprobs=2, max_tokens=3))
    completion = finals(run(engine))["a"].outputs[0]
    assert [list(position) for position in completion.logprobs] == [[98, 99], [99, 100], [120, 100, 101]]
    assert [position[token_id].rank for position, token_id in zip(completion.logprobs, b"bcx", strict=True)] == [
        1,
        1,
        21,
    ]
    assert completion.logprobs[2][100].decoded_token == "d"
    expected = sum(position[token_id].logprob for position, token_id in zip(completion.logprobs, b"bcx", strict=True))
    assert completion.cumulative_logprob == pytest.approx(expected)


def test_prompt_logprobs_come_once_for_n_and_survive_preemption() -> None:
    engine, _ = make_engine(mixing, following, num_blocks=14, max_num_seqs=8)
    for i in range(4):
        params = SamplingParams(n=2, prompt_logprobs=0, max_tokens=12, ignore_eos=True)
        engine.add_request(str(i), f"prompt {i}", params)
    ended = finals(run(engine))
    assert sum(output.metrics.num_preemptions for output in ended.values()) > 0, "the test needs a full cache"
    for i, output in enumerate(ended.values()):
        tokens = list(f"prompt {i}".encode())
        assert [next(iter(values)) for values in output.prompt_logprobs[1:]] == tokens[1:]
    assert_all_home(engine)
