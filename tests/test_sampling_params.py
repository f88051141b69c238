import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidParameterError
from quire.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from quire.structured_outputs import StructuredOutputsParams

# vLLM's; its [] for an unset list is () here. Those of `LLAMA_CPP_FIELDS` are llama.cpp's.
DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "bad_words": (),
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "logit_bias": None,
    "allowed_token_ids": None,
    "structured_outputs": None,
    "logits_processors": None,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": None,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
}

NAN, INF = math.nan, math.inf
INT_JUNK: list[Any] = ["1", 1.0, True, [1], NAN]
NUMBER_JUNK: list[Any] = ["1", True, [1.0], None, NAN, INF, -INF, 10**400]
BOOL_JUNK: list[Any] = [0, 1, "true", None]

# Field -> (bad values, what the limit must say).
BAD_VALUES: dict[str, tuple[list[Any], str]] = {
    "n": ([0, -1, 16385, None, *INT_JUNK], "integer in [1, 16384]"),
    "presence_penalty": ([-2.1, 2.1, *NUMBER_JUNK], "number in [-2, 2]"),
    "frequency_penalty": ([-2.1, 2.1, *NUMBER_JUNK], "number in [-2, 2]"),
    "repetition_penalty": ([0, 0.0, -1.0, *NUMBER_JUNK], "finite number > 0"),
    "temperature": ([-0.1, 2.1, *NUMBER_JUNK], "number in [0, 2]"),
    "top_p": ([0, 0.0, -0.1, 1.1, *NUMBER_JUNK], "number in (0, 1]"),
    "top_k": ([-2, None, *INT_JUNK], "integer of at least -1"),
    "min_p": ([-0.1, 1.1, *NUMBER_JUNK], "number in [0, 1]"),
    "typical_p": ([0, -0.1, 1.1, *NUMBER_JUNK], "number in (0, 1]"),
    "top_n_sigma": ([-1.1, 1001, *NUMBER_JUNK], "number in [-1, 1000]"),
    "xtc_probability": ([-0.1, 1.1, *NUMBER_JUNK], "number in [0, 1]"),
    "xtc_threshold": ([-0.1, 1.1, *NUMBER_JUNK], "number in [0, 1]"),
    "dry_multiplier": ([-0.1, 101, *NUMBER_JUNK], "number in [0, 100]"),
    "dry_base": ([0, 0.99, 101, *NUMBER_JUNK], "number in [1, 100]"),
    "dry_allowed_length": ([-1, None, *INT_JUNK], "integer of at least 0"),
    "dry_penalty_last_n": ([-2, None, *INT_JUNK], "integer of at least -1"),
    "dry_sequence_breakers": (["\n", [""], [5], 5, ["\ud800"]], "strings"),
    "mirostat": ([1, -1, 3, None, *INT_JUNK], "0 (off) or 2"),
    "mirostat_tau": ([-0.1, 101, *NUMBER_JUNK], "number in [0, 100]"),
    "mirostat_eta": ([-0.1, 1.1, *NUMBER_JUNK], "number in [0, 1]"),
    "dynatemp_range": ([-0.1, 2.1, *NUMBER_JUNK], "number in [0, 2]"),
    "dynatemp_exponent": ([-0.1, 10.1, *NUMBER_JUNK], "number in [0, 10]"),
    "logits_processors": (["abc", [5], 5, {"a": max}, ["abc"]], "list of functions"),
    "seed": ([2**64, -(2**63) - 1, *INT_JUNK], "integer in"),
    "stop": (["", "\ud800", [""], ["a", ""], 5, [5], b"x", [b"x"], {"a"}], "list of"),
    "stop_token_ids": ([5, "5", [-1], ["5"], [1.0], [True], [None], {5}], "list of token ids"),
    "bad_words": ([["\ud800"], [""], "x", 5, [5], ["x"] * 129], "strings"),
    "include_stop_str_in_output": (BOOL_JUNK, "true or false"),
    "ignore_eos": (BOOL_JUNK, "true or false"),
    "max_tokens": ([0, -1, *INT_JUNK], "integer of at least 1"),
    "min_tokens": ([-1, 17, None, *INT_JUNK], ""),
    "logprobs": ([-2, *INT_JUNK], "integer of at least -1"),
    "prompt_logprobs": ([-2, *INT_JUNK], "integer of at least -1"),
    "detokenize": (BOOL_JUNK, "true or false"),
    "skip_special_tokens": (BOOL_JUNK, "true or false"),
    "logit_bias": (
        [
            5,
            [1],
            {"x": 1.0},
            {-1: 1.0},
            {None: 1.0},
            {1: 101.0},
            {1: -101.0},
            {1: NAN},
            {1: INF},
            {1: "2"},
            {1: True},
            {1.5: 1.0},
            {INF: 1.0},
            {True: 1.0},
            {"-1": 1.0},
            {"": 1.0},
            {"9" * 5000: 1.0},
        ],
        "",
    ),
    "allowed_token_ids": ([[], 5, "5", [-1], ["5"], [1.5], [False]], "list"),
    "structured_outputs": ([{"regex": "a"}, "json", 1, True], "StructuredOutputsParams"),
}

GOOD_VALUES: dict[str, list[Any]] = {
    "n": [1, 16384],
    "presence_penalty": [-2, 2.0, 0.5],
    "frequency_penalty": [-2.0, 2, -0.5],
    "repetition_penalty": [1e-6, 1, 100.0],
    "temperature": [0, 0.0, 2, 1e-9],
    "top_p": [1, 1e-9],
    "top_k": [-1, 0, 1, 10**6],
    "min_p": [0, 1, 0.5],
    "typical_p": [1, 1e-9],
    "top_n_sigma": [-1, 0, 1000.0],
    "xtc_probability": [0, 1.0],
    "xtc_threshold": [0, 1.0],
    "dry_multiplier": [0, 100.0],
    "dry_base": [1, 100.0],
    "dry_allowed_length": [0, 10**6],
    "dry_penalty_last_n": [-1, 0, 10**6],
    "dry_sequence_breakers": [None, [], ["x"] * 128],
    "mirostat": [0, 2],
    "mirostat_tau": [0, 100.0],
    "mirostat_eta": [0, 1.0],
    "dynatemp_range": [0, 2.0],
    "dynatemp_exponent": [0, 10.0],
    "logits_processors": [None, [], [max]],
    "seed": [None, 0, -1, 2**64 - 1, -(2**63)],
    "stop": [None, [], ["a", "b"], ("a",)],
    "stop_token_ids": [None, [], [0, 5]],
    "bad_words": [None, [], ["x"] * 128],
    "max_tokens": [None, 1, 10**9],
    "min_tokens": [0, 16],
    "logprobs": [None, -1, 0, 20],
    "prompt_logprobs": [None, -1, 0, 20],
    "logit_bias": [None, {}, {0: -100, 5: 100.0}],
    "allowed_token_ids": [None, [0], (1, 2)],
    "structured_outputs": [None, StructuredOutputsParams(regex="a")],
}


def cases(table: dict[str, Any]) -> list[Any]:
    pairs = [
        (name, value) for name, entry in table.items() for value in (entry[0] if isinstance(entry, tuple) else entry)
    ]
    return [pytest.param(name, value, id=f"{name}={value!r}"[:60]) for name, value in pairs]


def test_defaults_equal_vllm_and_llama_cpp() -> None:
    params = SamplingParams()
    assert {item.name: getattr(params, item.name) for item in fields(SamplingParams)} == DEFAULTS


def test_every_field_has_bad_values_here() -> None:
    assert set(BAD_VALUES) == {item.name for item in fields(SamplingParams)}


@pytest.mark.parametrize(("name", "value"), cases(BAD_VALUES))
def test_bad_values_are_errors_naming_field_value_and_limit(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert error.field == name
    assert BAD_VALUES[name][1] in error.limit
    assert error.limit
    assert error.message == f"{name} must be {error.limit}, got {error.message.split(', got ', 1)[1]}"
    assert "\n" not in error.message
    contained = [value, *value] if isinstance(value, (list, tuple, set)) else [value]
    contained += [item for pair in value.items() for item in pair] if isinstance(value, dict) else []
    if name == "bad_words" and isinstance(value, list) and len(value) > 1:
        contained = [129]
    assert any(error.value is item or error.value == item for item in contained), "the value given is in the message"


@pytest.mark.parametrize(("name", "value"), cases(GOOD_VALUES))
def test_values_at_the_limits_are_kept(name: str, value: Any) -> None:
    is_list = isinstance(getattr(SamplingParams(), name), tuple) or isinstance(value, list)
    assert getattr(SamplingParams(**{name: value}), name) == (tuple(value or ()) if is_list else value)


def test_min_tokens_is_limited_by_max_tokens() -> None:
    SamplingParams(min_tokens=1000, max_tokens=None)
    with pytest.raises(InvalidParameterError, match=r"min_tokens must be at most max_tokens \(3\), got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidParameterError, match="stop must be empty when detokenize=False") as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.field == "stop"
    SamplingParams(detokenize=False, stop_token_ids=[1])


def test_one_stop_string_may_come_without_a_list() -> None:
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_token_ids_lose_repeats_and_keep_order() -> None:
    assert SamplingParams(stop_token_ids=[5, 1, 5]).stop_token_ids == (5, 1)
    assert SamplingParams(allowed_token_ids=[9, 9, 2]).allowed_token_ids == (9, 2)


def test_logit_bias_takes_json_keys() -> None:
    assert SamplingParams(logit_bias={"17": 1, 3: -2.5}).logit_bias == {17: 1.0, 3: -2.5}


def test_lists_of_the_caller_are_copied() -> None:
    stop, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 2.0
    assert params.stop_strings == ("a",)
    assert params.logit_bias == {1: 1.0}


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.none(), st.floats()), max_size=3),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), st.one_of(st.integers(), st.floats()), max_size=2),
)


@given(values=st.dictionaries(st.sampled_from(sorted(DEFAULTS)), JUNK, max_size=4))
def test_any_value_is_accepted_or_named_in_the_error(values: dict[str, Any]) -> None:
    error: InvalidParameterError | None = None
    try:
        SamplingParams(**values)
    except InvalidParameterError as caught:
        error = caught
    if error is not None:
        assert error.field in {*values, "min_tokens"}
        assert error.message.startswith(f"{error.field} must be ")


# --- Pooling and beams ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("pooling", "max"), ("pooling", None), ("normalize", 1), ("normalize", None)]
)
def test_bad_pooling_values(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        PoolingParams(**{name: value})
    assert (caught.value.field, caught.value.value) == (name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("beam_width", value) for value in (0, -1, 257, None, *INT_JUNK)],
        *[("max_tokens", value) for value in (0, -1, None, *INT_JUNK)],
        *[("length_penalty", value) for value in (-10.1, 10.1, *NUMBER_JUNK)],
        *[("ignore_eos", value) for value in BOOL_JUNK],
        *[("include_stop_str_in_output", value) for value in BOOL_JUNK],
        *[("stop_token_ids", value) for value in (5, [-1], ["1"])],
    ],
)
def test_bad_beam_values(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5, name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("other", ["typical_p", "xtc_probability", "dynatemp_range", "top_n_sigma"])
def test_mirostat_refuses_the_samplers_that_it_replaces(other: str) -> None:
    with pytest.raises(InvalidParameterError, match="with mirostat 2, which replaces it") as caught:
        SamplingParams(mirostat=2, **{other: 0.5})  # type: ignore[arg-type]
    assert caught.value.field == other
    assert SamplingParams(mirostat=2, top_k=5, top_p=0.5, min_p=0.1, dry_multiplier=1).uses_chain


def test_parameters_without_effect_leave_the_native_sampler_its_rows() -> None:
    inert = {"xtc_threshold": 0.3, "dry_base": 2.0, "mirostat_tau": 3.0, "dynatemp_exponent": 2.0, "top_n_sigma": 0.0}
    assert SamplingParams(**inert).takes_logits_as_they_are  # type: ignore[arg-type]
    assert not SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=0).uses_chain
    assert not SamplingParams(dry_multiplier=1.0).takes_logits_as_they_are
    assert not SamplingParams(logits_processors=[max]).takes_logits_as_they_are
