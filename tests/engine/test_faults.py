"""Injected faults end the requests that meet them, and no others."""

from collections.abc import Sequence
from typing import Any

import pytest

from quire.engine.llm_engine import LLMEngine
from quire.errors import EngineError
from quire.sampling_params import PoolingParams, SamplingParams
from tests.engine.builders import (
    ScriptedExecutor,
    assert_all_home,
    assert_forgotten,
    byte_tokenizer,
    finals,
    make_engine,
    run,
    saying,
)
from tests.faults.injection import NAN_ERROR, FaultyExecutor, FaultyTokenizer, parse_faults


def make(faults: str, **scheduler: Any) -> LLMEngine:
    known = parse_faults(faults)
    return make_engine(
        saying("abcdef"), has_tokenizer=False, wrap=lambda executor: FaultyExecutor(executor, known), **scheduler
    )[0]


def results(engine: LLMEngine, **requests: list[int]) -> dict[str, tuple[list[int], str | None]]:
    """Per request its tokens and its error."""
    for name, prompt in requests.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=6))
    ended = finals(run(engine))
    assert_all_home(engine)
    return {name: (output.outputs[0].token_ids, output.outputs[0].error) for name, output in ended.items()}


ALL = list(b"abcdef")


def test_nan_logits_fail_every_request_with_the_token() -> None:
    engine = make("nan-logits:token=9;nan-logits:token=98", max_num_batched_tokens=8)
    found = results(engine, bad=[9] + [1] * 20, generates=[2])
    # "b" is 98.
    assert found == {"bad": ([], NAN_ERROR), "generates": (ALL[:2], NAN_ERROR)}
    engine.add_request("vector", [9, 1], PoolingParams())
    engine.add_request("other", [1, 1], PoolingParams())
    ended = finals(run(engine))
    assert (ended["vector"].error, ended["other"].error) == (NAN_ERROR, None)


NO_TEXT = "the text of this request could not be made (InjectedError); the engine's log says more"
TEXT_PARAMS = {
    "in the detokeniser": SamplingParams(max_tokens=6),
    "in its log-probabilities": SamplingParams(max_tokens=6, logprobs=1, detokenize=False),
    "in its prompt's log-probabilities": SamplingParams(max_tokens=6, prompt_logprobs=1, detokenize=False),
    "in its last token": SamplingParams(max_tokens=3),
    "beside a stop string": SamplingParams(max_tokens=6, stop=["never"]),
    "in both of two": SamplingParams(max_tokens=6, n=2, seed=1),
}


def make_with_bad_text(token_id: int) -> tuple[LLMEngine, ScriptedExecutor]:
    """Make an engine that generates "abcdef" and whose tokenizer raises on one token."""
    tokenizer = FaultyTokenizer(byte_tokenizer(), parse_faults(f"raise-in-output:token={token_id}"))
    return make_engine(
        lambda known, num_prompt, seed: (
            known[1] if len(known) == num_prompt + 2 else ALL[min(5, len(known) - num_prompt)]
        ),
        tokenizer=tokenizer,
    )


@pytest.mark.parametrize("where", TEXT_PARAMS)
def test_failing_detokenizer_fails_its_request_alone(where: str) -> None:
    bad = ord("!")
    engine, executor = make_with_bad_text(bad)
    wanted, _ = make_engine(executor.next_token)
    for other in (engine, wanted):
        other.add_request("good", "?", SamplingParams(max_tokens=20, logprobs=1))
    # The prompt's bad token is three tokens back, where a detokeniser does not look.
    engine.add_request("bad", [1, bad, *b"...."], TEXT_PARAMS[where])
    ended = finals(run(engine))
    assert [(item.finish_reason, item.error) for item in ended["bad"].outputs] == (
        [("error", NO_TEXT)] * len(ended["bad"].outputs)
    )
    assert ended["good"].outputs == finals(run(wanted))["good"].outputs
    assert not engine.errored
    assert_all_home(engine)
    assert_forgotten(engine, executor)


def test_prompt_whose_text_raises_is_refused() -> None:
    engine, executor = make_with_bad_text(ord("!"))
    with pytest.raises(EngineError, match="could not be made"):
        engine.add_request("bad", "!", SamplingParams(n=2))
    engine.add_request("bad", "?", SamplingParams(max_tokens=3, n=2))
    assert {item.finish_reason for item in finals(run(engine))["bad"].outputs} == {"length"}
    assert_forgotten(engine, executor)


class _NoEnd(FaultyTokenizer):
    """Fails where a sequence ends with half a character."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if ids and ids[-1] >= 128 and self.ends:
            raise RuntimeError("no end")
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("by", ["abort", "death"])
def test_request_ends_although_its_last_text_raises(by: str) -> None:
    tokenizer = _NoEnd(byte_tokenizer(), [])
    tokenizer.byte_decoding, tokenizer.ends = None, False
    engine, executor = make_engine(saying("ab\N{SNOWMAN}"), tokenizer=tokenizer)
    engine.add_request("a", "p", SamplingParams(max_tokens=20))
    for _ in range(3):
        engine.step()
    tokenizer.ends = True
    if by == "abort":
        engine.abort_request("a")
        output = finals(run(engine))["a"].outputs[0]
        assert (output.text, output.finish_reason) == ("ab", "error")
        assert "RuntimeError" in output.error
        assert_all_home(engine)
        assert_forgotten(engine, executor)
    else:
        output = finals(engine.fail(RuntimeError("dead")))["a"].outputs[0]
        assert (output.text, output.error) == ("ab", "the engine stopped after RuntimeError: dead")
