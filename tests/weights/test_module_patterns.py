"""Patterns of module names: PEFT's meaning, and no pattern that takes hours."""

import json
import re

import pytest

from quire.errors import ModelFileError
from quire.weights.adapter_files import MAX_NAME_LEN, values_of_modules
from tests.processes import limit, outcomes_of

MODULES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(40) for name in "qkvo"]
HOSTILE = {
    "nested repetition": ["(.+)+$x"],
    "alternatives": ["(a|a|[a-z_.0-9])*$x"],
    "repeated groups": ["(.*o){20}$x"],
    "large counts": ["(.{1,1000}){1,1000}"],
    "empty parts": ["(x?){20000}"],
    "letters": [r"\w{290}"],
    "look-around": ["(?!x)(.+)+$x"],
    "reference": [r"(.+)\1+$x"],
    "open groups": ["(" * 5000],
    "long": ["(q|k)" * 1000],
    "many": [f"(x?){{20000}}|{number}" for number in range(1000)],
}


def peft_value(patterns: dict[str, float], module: str) -> float | None:
    """As PEFT's `get_pattern_key` does."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), None)


@pytest.mark.parametrize(
    "patterns",
    [
        {"q_proj": 4, "self_attn.k_proj": 8},
        {"proj": 1, "attn.q_proj": 2, "1.self_attn.q_proj": 3},
        {"model.layers.0.self_attn.q_proj": 3, "q_proj": 2},
        {r".*layers\.(4|5)\..*": 7, "k_proj": 2, "[qv]_proj": 9},
        {"^model.layers.3.self_attn.o_proj": 3, "^layers.1.self_attn.o_proj": 5},
        {r"layers\.\d{2}\.self_attn\.(q|v)_proj$": 2, "x|o_proj": 6},
        {name: index for index, name in enumerate(MODULES, start=1)},
    ],
)
def test_first_matching_pattern_gives_the_value_as_in_peft(patterns: dict[str, float]) -> None:
    found = values_of_modules(patterns, MODULES)
    assert {module: found.get(module) for module in MODULES} == {name: peft_value(patterns, name) for name in MODULES}


def try_patterns(*names: str) -> None:
    """Give hostile patterns to modules."""
    for name in names:
        limit()
        try:
            outcome = str(values_of_modules(dict.fromkeys(HOSTILE[name], 4.0), MODULES))
        except ModelFileError as error:
            outcome = f"refused: {error}"
        print(json.dumps([name, outcome]), flush=True)


def test_hostile_patterns_end() -> None:
    outcomes = outcomes_of("tests.weights.test_module_patterns:try_patterns", HOSTILE)
    assert {name: text for name, text in outcomes.items() if text != "{}" and not text.startswith("refused: ")} == {}


def test_name_that_no_module_has_is_refused() -> None:
    with pytest.raises(ModelFileError, match=f"has {MAX_NAME_LEN + 1} characters"):
        values_of_modules({"q_proj": 4}, ["a" * (MAX_NAME_LEN + 1)])
