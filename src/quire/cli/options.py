"""Flags made from `EngineOptions`, `ServerOptions` and `SamplingParams`: same names with dashes, same defaults, one
environment variable each (`QUIRE_MAX_MODEL_LEN`), so that Python, command line and reference agree.

A flag that is not given stays unset: the dataclass, the model's generation config or `resolve` chooses.
Next to read: `values.py`, then `run.py`.
"""

import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from quire.cli.command import option
from quire.cli.values import BYTES, JSON_OBJECT, LENGTH, STRUCTURED, TEXT, TOKEN_BIAS
from quire.config import EngineOptions
from quire.sampling_params import MODEL_DEFAULTS, SamplingParams
from quire.server.options import ServerOptions
from quire.structured_outputs import StructuredOutputsParams

GROUPS = {"debug": "Debugging"}
_PREFIXES: dict[type[Any], str] = {EngineOptions: "engine", ServerOptions: "server", SamplingParams: "sampling"}
_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])

SAMPLING_HELP = dict(re.findall(r"^        (\w+): (.*?)(?:\. .*|\.)$", SamplingParams.__doc__ or "", re.MULTILINE))
"""Help of each field of `SamplingParams`: the first sentence in its docstring; a test compares the names."""
OF_SERVE = frozenset({"data_parallel_size", "data_parallel_rank"})
"""Engine options that only `quire serve` can follow."""
COMPUTED_DEFAULTS = {
    "tokenizer": "the model's",
    "revision": "main",
    "hf_overrides": "none",
    "chat_template": "the model's",
    "quantization": "none",
    "draft_model": "none",
    "weight_cache_bytes": "half of the free disk space",
    "max_model_len": "the model's context, at most 8192 and what fits in memory",
    "block_size": "32",
    "kv_cache_memory_bytes": "computed",
    "num_blocks_override": "computed from kv_cache_memory_bytes",
    "kv_disk": "none",
    "kv_disk_bytes": "8 GiB",
    "swap_space": "as much as the KV cache, at most 4 GiB",
    "max_num_waiting": "no limit",
    "data_parallel_rank": "none",
    "served_model_name": "the model option",
    "keep_alive": "one model stays loaded; of several 5m",
    "models_memory_bytes": "90 % of the memory that is available at start",
    "api_key_file": "none",
    "reasoning_budget": "no limit",
    "requests_per_minute": "no limit",
    "tokens_per_minute": "no limit",
}
"""Shown defaults of engine and server options whose default is None; a test compares them with `resolve`."""


def option_flags(
    kind: type[Any], *, without: frozenset[str] = frozenset(), defaults: Mapping[str, str] | None = None
) -> Callable[[_Decorated], _Decorated]:
    """Decorate with one flag per field of `kind` that is not in `without`. `defaults` are shown instead of its own."""
    hints = get_type_hints(kind)

    def decorate(function: _Decorated) -> _Decorated:
        for item in reversed(fields(kind)):
            if item.name not in without and not item.metadata.get("python_only"):
                shown = (defaults or {}).get(item.name, _default_text(item, kind))
                function = _flag(item, hints[item.name], shown, _PREFIXES[kind])(function)
        return function

    return decorate


def chosen_options(values: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Remove the flags of `kind` from a verb's keyword arguments; returns those that were set. Mutates: `values`."""
    taken = {item.name: values.pop(f"{_PREFIXES[kind]}_{item.name}", None) for item in fields(kind)}
    chosen = {name: value for name, value in taken.items() if value is not None and value != ()}
    if "logit_bias" in chosen:
        chosen["logit_bias"] = dict(chosen["logit_bias"])
    return chosen


def environment_name(field_name: str) -> str:
    """Return the environment variable of a field: `max_model_len` → `QUIRE_MAX_MODEL_LEN`."""
    return f"QUIRE_{field_name.upper()}"


revision_option = option("--revision", envvar=environment_name("revision"), metavar="TEXT", help="hub revision")


def parse_sampling_value(name: str, text: str) -> Any:
    """Parse the value of one sampling field, e.g. of the chat's `/set temperature 0.7`.

    Raises: click.BadParameter on a malformed value; KeyError on an unknown field.
    """
    settings = _click_settings(get_type_hints(SamplingParams)[name], name)
    value = settings["type"].convert(text, None, None)
    if name == "logit_bias":
        return dict([value])
    return [value] if settings.get("multiple") else value


def _flag(item: Field[Any], hint: Any, default_text: str, prefix: str) -> Callable[[_Decorated], _Decorated]:
    settings = _click_settings(hint, item.name)
    if item.metadata.get("choices"):
        settings["type"] = click.Choice(item.metadata["choices"])
    flag = "--" + item.name.replace("_", "-")
    if settings.get("is_flag"):
        flag = f"{flag}/--no-{flag[2:]}"
    group = item.metadata.get("group", "sampling")
    variable = environment_name(item.name)
    shown = f"{default_text}; {variable}" if default_text else variable
    help_text = item.metadata.get("help") or SAMPLING_HELP.get(item.name, "")
    return option(
        flag,
        f"{prefix}_{item.name}",
        group=GROUPS.get(group, group.title()),
        default=None,
        envvar=variable,
        help=f"{help_text}  [{shown}]",
        **settings,
    )


def _click_settings(hint: Any, name: str) -> dict[str, Any]:
    """Return the settings of a Click option for values of a field's type."""
    kinds = {get_origin(kind) or kind for kind in _alternatives(hint)} - {type(None)}
    if bool in kinds:
        return {"is_flag": True, "type": click.BOOL}
    if name == "logit_bias":
        return {"type": TOKEN_BIAS, "multiple": True}
    if StructuredOutputsParams in kinds:
        return {"type": STRUCTURED}
    if Mapping in kinds:
        return {"type": JSON_OBJECT}
    if Sequence in kinds:
        element = next(get_args(kind)[0] for kind in _alternatives(hint) if get_origin(kind) is Sequence)
        return {"type": LENGTH if element is int else TEXT, "multiple": True}
    if float in kinds:
        return {"type": click.FLOAT}
    if int in kinds:
        return {"type": BYTES if "bytes" in name else LENGTH}
    return {"type": TEXT}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)


def _default_text(item: Field[Any], kind: type[Any]) -> str:
    value = item.default
    if kind is SamplingParams and item.name in MODEL_DEFAULTS:
        return "the model's"
    if value is MISSING or value is None or value == ():
        return COMPUTED_DEFAULTS.get(item.name, "") if kind is not SamplingParams else ""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
