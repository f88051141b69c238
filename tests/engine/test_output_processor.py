import math

from quire.sampling_params import SamplingParams
from tests.engine.builders import VOCAB_SIZE, assert_all_home, finals, make_engine, mixing, run


def following(known: list[int]) -> list[float]:
    """Likeliest is the byte after the last one; each token further on is half as likely."""
    total = sum(0.5**rank for rank in range(VOCAB_SIZE))
    return [math.log(0.5 ** ((token_id - known[-1] - 1) % VOCAB_SIZE) / total) for token_id in range(VOCAB_SIZE)]


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
