"""Flags are the fields: same names, all of them, with help; values arrive as the dataclasses want them."""

from dataclasses import fields
from typing import Any

import click
import pytest
from click.testing import CliRunner

from quire.cli.options import (
    COMPUTED_DEFAULTS,
    SAMPLING_HELP,
    chosen_options,
    environment_name,
    option_flags,
    parse_sampling_value,
)
from quire.config import DEFAULT_MAX_MODEL_LEN_CAP, EngineOptions
from quire.resolve import DEFAULT_BLOCK_SIZE
from quire.sampling_params import SamplingParams
from quire.server.options import ServerOptions
from quire.structured_outputs import StructuredOutputsParams

Chosen = tuple[dict[str, Any], dict[str, Any]]


def parse(*arguments: str, env: dict[str, str] | None = None) -> Chosen:
    """Return the options that the flags of a verb become."""
    seen: list[Chosen] = []

    @click.command()
    @option_flags(SamplingParams)
    @option_flags(EngineOptions, without=frozenset({"seed"}))
    def verb(**values: Any) -> None:
        seen.append((chosen_options(values, EngineOptions), chosen_options(values, SamplingParams)))
        assert values == {}, "every flag belongs to one of the two"

    result = CliRunner().invoke(verb, arguments, env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_every_sampling_field_has_help_and_every_unset_option_a_computed_default() -> None:
    assert set(SAMPLING_HELP) == {item.name for item in fields(SamplingParams)}
    unset = [item.name for kind in (EngineOptions, ServerOptions) for item in fields(kind) if item.default is None]
    assert set(COMPUTED_DEFAULTS) == set(unset)
    assert COMPUTED_DEFAULTS["block_size"] == str(DEFAULT_BLOCK_SIZE)
    assert f"at most {DEFAULT_MAX_MODEL_LEN_CAP} " in COMPUTED_DEFAULTS["max_model_len"]


def test_environment_sets_what_the_command_line_does_not() -> None:
    env = {
        "QUIRE_MAX_MODEL_LEN": "1k",
        "QUIRE_TEMPERATURE": "0.25",
        "QUIRE_ENABLE_CHUNKED_PREFILL": "false",
        "QUIRE_STOP": "x y,z",
        "QUIRE_STOP_TOKEN_IDS": "1,2",
        "QUIRE_LOGIT_BIAS": "5=1,6=2",
    }
    assert parse() == ({}, {})
    engine, sampling = parse("--temperature", "0.75", env=env)
    assert engine == {"max_model_len": 1000, "enable_chunked_prefill": False}
    assert sampling == {
        "temperature": 0.75, "stop": ("x y", "z"), "stop_token_ids": (1, 2), "logit_bias": {5: 1.0, 6: 2.0},
    }  # fmt: skip


@pytest.mark.parametrize("options_class", [EngineOptions, ServerOptions, SamplingParams])
def test_every_field_is_a_flag_with_its_variable_and_default(options_class: type) -> None:
    decorate = option_flags(options_class)
    command = click.command()(decorate(lambda **values: None))
    options = {parameter.opts[0]: parameter for parameter in command.params}
    for item in fields(options_class):
        if item.metadata.get("python_only"):
            assert item.name == "logits_processors"
            continue
        option = options.pop("--" + item.name.replace("_", "-"))
        assert option.envvar == environment_name(item.name)
        assert environment_name(item.name) in option.help
        if isinstance(item.default, int | str) and "[the model's" not in option.help and not option.is_flag:
            assert f"[{item.default};" in option.help
    assert options == {}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("max_tokens", "1K", 1024),
        ("ignore_eos", "yes", True),
        ("stop", "end of text", ["end of text"]),
        ("logit_bias", "3=1", {3: 1.0}),
        ("structured_outputs", '{"regex": "a+"}', StructuredOutputsParams(regex="a+")),
    ],
)
def test_values_written_in_the_chat(name: str, text: str, value: object) -> None:
    assert parse_sampling_value(name, text) == value
