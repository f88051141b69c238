import math
import random

import pytest

from quire.engine.beam_search import BeamSearch
from quire.engine.llm import LLM
from quire.errors import ContextLengthError, InvalidParameterError, PromptError, RequestError
from quire.events import EventKind
from quire.outputs import BeamSearchOutput
from quire.sampling_params import BeamSearchParams, SamplingParams
from tests.engine.builders import EOS, VOCAB_SIZE, Logprobs, assert_all_home, assert_forgotten, make_engine
from tests.scheduler.integrity import check_integrity

LETTERS = [*range(97, 103), EOS]


def table(seed: int, eos_weight: float = 1.0) -> Logprobs:
    """Random log-probabilities that depend on all tokens; only six letters and EOS are likely."""

    def logprobs(known: list[int]) -> list[float]:
        numbers = random.Random(f"{seed}:{known}")
        weights = [1e-6 * numbers.random() for _ in range(VOCAB_SIZE)]
        for token_id in LETTERS:
            weights[token_id] = numbers.random() * (eos_weight if token_id == EOS else 1.0)
        total = sum(weights)
        return [math.log(weight / total) for weight in weights]

    return logprobs


def naive(logprobs: Logprobs, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """Beam search by the book: whole sequences, no cache. (tokens, score), best first."""
    ending = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})

    def score(tokens: list[int], total: float) -> float:
        return total / len(tokens) ** params.length_penalty

    live: list[tuple[list[int], float]] = [([], 0.0)]
    completed: list[tuple[list[int], float]] = []
    for _ in range(params.max_tokens):
        candidates = []
        for tokens, total in live:
            values = logprobs(prompt + tokens)
            likeliest = sorted(range(len(values)), key=lambda index: -values[index])[: 2 * params.beam_width]
            candidates += [([*tokens, token_id], total + values[token_id]) for token_id in likeliest]
        completed += [item for item in candidates if item[0][-1] in ending]
        going_on = [item for item in candidates if item[0][-1] not in ending]
        live = sorted(going_on, key=lambda item: -item[1])[: params.beam_width]
    ranked = sorted(completed + live, key=lambda item: -score(*item))[: params.beam_width]
    return [(tokens, score(tokens, total)) for tokens, total in ranked]


def assert_equal(output: BeamSearchOutput, expected: list[tuple[list[int], float]]) -> None:
    assert [sequence.token_ids for sequence in output.sequences] == [tokens for tokens, _ in expected]
    for sequence, (_, score) in zip(output.sequences, expected, strict=True):
        assert sequence.score == pytest.approx(score)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5, 2.0])
def test_equals_beam_search_by_the_book(width: int, length_penalty: float) -> None:
    for seed in range(4):
        logprobs = table(seed)
        engine, executor = make_engine(logprobs=logprobs)
        params = BeamSearchParams(beam_width=width, max_tokens=7, length_penalty=length_penalty)
        prompt = [97, 98, 99, 100, 101]
        (output,) = LLM.from_engine(engine).beam_search([prompt], params)
        assert_equal(output, naive(logprobs, prompt, params))
        assert_all_home(engine)
        assert_forgotten(engine, executor)


def test_preempted_beams_go_on_with_the_same_result() -> None:
    logprobs = table(7, eos_weight=0.01)
    params = BeamSearchParams(beam_width=4, max_tokens=24)
    engine, _ = make_engine(logprobs=logprobs, num_blocks=18, enable_prefix_caching=False, max_in_flight=2)
    prompts = [[97] * 9, [98] * 10]
    outputs = LLM.from_engine(engine).beam_search(prompts, params)
    assert engine.events.of(EventKind.PREEMPT), "the test needs a full cache"
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_equal(output, naive(logprobs, prompt, params))
    assert_all_home(engine)


def test_beams_share_blocks() -> None:
    engine, _ = make_engine(logprobs=table(8, eos_weight=1e-6))
    LLM.from_engine(engine).beam_search([[97] * 40], BeamSearchParams(beam_width=4, max_tokens=8))
    shared = engine.events.of(EventKind.SHARE)
    assert shared, "forks share"
    computed = sum(event.data["num_tokens"] for event in engine.events.of(EventKind.STEP))
    assert computed == 40 + 4 * 7, "the prompt and each beam's tokens are computed once"


def test_ignore_eos_and_stop_tokens() -> None:
    logprobs = table(9, eos_weight=3.0)
    for params in (
        BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=6, stop_token_ids=[97, 98]),
    ):
        engine, _ = make_engine(logprobs=logprobs)
        (output,) = LLM.from_engine(engine).beam_search([[97, 98]], params)
        assert_equal(output, naive(logprobs, [97, 98], params))


def test_ending_token_is_listed_and_shown_only_when_asked_for() -> None:
    for shown in (False, True):
        params = BeamSearchParams(
            beam_width=2, max_tokens=6, stop_token_ids=[97], ignore_eos=True, length_penalty=-1,
            include_stop_str_in_output=shown,
        )  # fmt: skip
        engine, _ = make_engine(logprobs=table(10))
        (output,) = LLM.from_engine(engine).beam_search([[98]], params)
        ended = [sequence for sequence in output.sequences if sequence.finish_reason == "stop"]
        assert ended
        for sequence in ended:
            assert sequence.token_ids[-1] == 97
            assert sequence.text.endswith("a") == shown


def test_context_ends_the_beams() -> None:
    engine, _ = make_engine(logprobs=table(11, eos_weight=1e-6), max_model_len=16)
    (output,) = LLM.from_engine(engine).beam_search([[97] * 12], BeamSearchParams(beam_width=2, max_tokens=99))
    assert [len(sequence.token_ids) for sequence in output.sequences] == [4, 4]
    assert_all_home(engine)


def test_mistakes() -> None:
    engine, _ = make_engine()
    llm = LLM.from_engine(engine)
    with pytest.raises(InvalidParameterError, match=r"max_num_seqs \(16\)"):
        llm.beam_search("abc", BeamSearchParams(beam_width=17, max_tokens=1))
    with pytest.raises(PromptError):
        llm.beam_search(["abc", ""], BeamSearchParams(beam_width=2, max_tokens=1))
    with pytest.raises(ContextLengthError):
        llm.beam_search([[1] * 128], BeamSearchParams(beam_width=2, max_tokens=1))
    with pytest.raises(RequestError):
        llm.beam_search("abc", SamplingParams())  # type: ignore[arg-type]
    assert_all_home(engine)


def test_cancel_at_any_step_frees_everything() -> None:
    for num_steps in range(6):
        engine, executor = make_engine(logprobs=table(12))
        search = BeamSearch(engine, "b", [97] * 6, BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True))
        search.start()
        for _ in range(num_steps):
            engine.step()
            search.advance()
            check_integrity(engine.scheduler)
        search.cancel()
        assert_all_home(engine)
        assert_forgotten(engine, executor)


def test_stop_token_outside_the_vocabulary_is_refused() -> None:
    engine, _ = make_engine()
    params = BeamSearchParams(beam_width=2, max_tokens=3, stop_token_ids=[VOCAB_SIZE])
    with pytest.raises(InvalidParameterError, match="stop_token_ids must be token ids in the vocabulary"):
        LLM.from_engine(engine).beam_search("abc", params)
