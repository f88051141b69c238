"""The words of a command line: flags made from `EngineOptions`, `ServerOptions` and `SamplingParams` (same names with
dashes, same defaults, one environment variable each, such as `QUIRE_MAX_MODEL_LEN`), their values, `[MODEL] [PROMPT]`.

A flag that is not given stays unset: the dataclass, the model's generation config or `resolve` chooses. Knows no verb.
Next to read: `run.py`.
"""

import json
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from quire.cli.command import option
from quire.config import EngineOptions
from quire.errors import InvalidParameterError, PromptError
from quire.sampling_params import MODEL_DEFAULTS, SamplingParams
from quire.server.options import ServerOptions
from quire.structured_outputs import StructuredOutputsParams

# --- Values: lengths (32K), bytes (2GiB), lists, JSON, token=bias; a bad one names what is accepted ---

_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
LENGTH_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
"""As in vLLM: small letters are decimal, capitals binary."""
BYTE_SUFFIXES = {
    "": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


class Value(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A value that `parse` makes of a text; several in one environment variable are separated by commas.

    `expected` completes "'…' is not" where `parse` raises ValueError.
    """

    envvar_list_splitter = ","

    def __init__(self, name: str, parse: Callable[[str], Any], expected: str) -> None:
        self.name, self._parse, self._expected = name, parse, expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the parsed value; fails naming the text and what is accepted."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except InvalidParameterError as error:
            self.fail(error.message, param, ctx)
        except ValueError as error:
            self.fail(
                str(error) if isinstance(error, NamedValueError) else f"'{value}' is not {self._expected}", param, ctx
            )


class NamedValueError(ValueError):
    """A ValueError whose message says everything."""


def parse_length(text: str) -> int:
    """Return a count: `2k` is 2000, `2K` is 2048, `25.6k` is 25600. Raises: ValueError."""
    return _parse_suffixed(text, LENGTH_SUFFIXES)


def parse_bytes(text: str) -> int:
    """Return a size: `2GiB` is 2147483648, `1.5GB` is 1500000000, `4096` is itself. Raises: ValueError."""
    return _parse_suffixed(text, BYTE_SUFFIXES)


def _parse_suffixed(text: str, suffixes: dict[str, int]) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in suffixes:
        raise ValueError(text)
    # Integers only: 0.1GiB must not depend on how a float rounds.
    whole, _, fraction = match[1].partition(".")
    scaled, scale = int(whole + fraction) * suffixes[match[2]], int("1" + "0" * len(fraction))
    if scaled % scale and suffixes[match[2]] == 1:
        raise ValueError(text)
    return scaled // scale


def _parse_lengths(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(parse_length(part) for part in text.split(",") if part.strip()))


def _parse_every_length(text: str) -> tuple[int, ...]:
    return tuple(parse_length(part) for part in text.split(","))


def _parse_object(text: str) -> dict[str, Any]:
    parsed = json.loads(text)
    if not isinstance(parsed, dict):
        raise ValueError(text)
    return parsed


def _parse_bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


def _parse_structured(text: str) -> StructuredOutputsParams:
    """Parse the fields of `StructuredOutputsParams` as a JSON object, or @FILE with one."""
    try:
        source = Path(text[1:]).expanduser().read_text(encoding="utf-8") if text.startswith("@") else text
        fields = json.loads(source)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NamedValueError(f"'{text}' is neither a JSON object nor @FILE with one: {reason}") from None
    names = StructuredOutputsParams.__dataclass_fields__
    unknown = [name for name in fields if name not in names] if isinstance(fields, dict) else [source]
    if unknown:
        example = '{"regex": "[0-9]+"}'
        raise NamedValueError(f"'{unknown[0]}' is not one of {', '.join(names)}, as in {example}")
    return StructuredOutputsParams(**fields)


LENGTH = Value("n", parse_length, "a count such as 2048, 2K (2048) or 2k (2000)")
LENGTHS = Value("n,…", _parse_lengths, "a list of counts such as 128,512 or 1K,2K")
EVERY_LENGTH = Value("n,…", _parse_every_length, "a list of counts, one per request, such as 100,200,200")
BYTES = Value("bytes", parse_bytes, "a size such as 4096, 512MiB or 2GiB")
JSON_OBJECT = Value("json", _parse_object, 'a JSON object such as {"key": 1}')
STRUCTURED = Value("json|@file", _parse_structured, "a JSON object")
TOKEN_BIAS = Value("id=bias", _parse_bias, "TOKEN_ID=BIAS such as 42=-5")
TEXT = Value("text", str, "a text")


# --- Flags of dataclasses -------------------------------------------------------------------------

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


# --- `[MODEL] [PROMPT]`: which word is the model and which the text, and piped text ---------------

_NAME = re.compile(r"[A-Za-z0-9][\w.@:-]*", re.ASCII)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:\w[\w.-]*)?(@[\w./-]+)?|pypi:[\w.-]+==\S+", re.ASCII)
_PATH_STARTS = ("/", "./", "../", "~/")
_MODEL_SUFFIXES = (".gguf", ".safetensors")
STDIN = "-"


@dataclass(frozen=True)
class ModelAndText:
    """The model's name, and the text given on the command line (None: none, "-": standard input)."""

    model: str
    text: str | None

    @property
    def missing_text(self) -> str:
        """Why there is no text: the single word was taken for the model."""
        as_text = "" if _is_alias(self.model) or _exists(self.model) else f"; {prompt_form(self.model)}"
        return f"no text was given ('{self.model}' is the model{as_text})"


def prompt_form(word: str) -> str:
    """Say how to make a word the prompt that was taken for a model."""
    context = click.get_current_context(silent=True)
    verb = "run" if context is None else context.info_name
    return f"to use it as the prompt: quire {verb} {EngineOptions.model} '{word}'"


def split_arguments(
    words: tuple[str, ...], engine_values: dict[str, Any], *, what: str, plain_word_is_model: bool = True
) -> ModelAndText:
    """Tell model from text. `engine_values` may hold `--model` (or `QUIRE_MODEL`), which is the default model then.

    `what` names the text in errors, e.g. "prompt". A single plain word that is no alias is a model if
    `plain_word_is_model`: a mistyped alias is an error then. Raises: click.UsageError.
    """
    default = str(engine_values.get("model") or EngineOptions.model)
    if len(words) > 2:
        raise click.UsageError(f"{len(words)} words; at most MODEL and {what.upper()} are expected: quote the {what}")
    context = click.get_current_context(silent=True)
    source = context.get_parameter_source("engine_model") if context is not None else None
    by_flag = source is click.core.ParameterSource.COMMANDLINE
    if len(words) == 2:
        if by_flag:
            raise click.UsageError(f"the model is given twice: '{words[0]}' and --model {default}")
        return ModelAndText(words[0], words[1])
    if not words:
        return ModelAndText(default, None)
    if by_flag or not names_a_model(words[0], plain_word_is_model=plain_word_is_model):
        return ModelAndText(default, words[0])
    return ModelAndText(words[0], None)


def names_a_model(word: str, *, plain_word_is_model: bool = True) -> bool:
    """Return whether a single argument is a model: an alias, an existing path, a file name, a hub id or a plain word.

    A word with spaces or punctuation is a text.
    """
    if _is_alias(word):
        return True
    if word == STDIN or not word.strip() or "\n" in word:
        return False
    if word.startswith(_PATH_STARTS) or word.endswith(_MODEL_SUFFIXES):
        return not re.search(r"\s", word) or _exists(word)
    if _HUB_ID.fullmatch(word) or (plain_word_is_model and _NAME.fullmatch(word)):
        return True
    return _exists(word)


def read_text(word: str | None, *, missing: str) -> str | None:
    """Return a text of the command line, or standard input for "-" and where no text is given and input is piped.

    Both are read as UTF-8 in any locale. Returns: None on a terminal without a text. Raises: click.UsageError with
    `missing`, if standard input is needed and empty.
    """
    if word is not None and word != STDIN:
        return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if word is None and sys.stdin.isatty():
        return None
    piped = _piped()
    if not piped:
        raise click.UsageError(f"{missing if word is None else 'nothing to read'}, and standard input is empty")
    return piped


def read_prompt(word: str | None, *, missing: str, file: str | None = None) -> str | None:
    """Return the prompt as `read_text` does; where input is piped, too, join both: input, a blank line, prompt.

    `file` takes the place of piped input; "-" is that. Raises: PromptError for an empty prompt, click.UsageError.
    """
    if file is not None:
        if word == STDIN:
            raise click.UsageError(f"the prompt is given twice: '-' and -f {file}")
        given = _piped() if file == STDIN else _file_text(file)
        if not given:
            raise PromptError(f"-f {file}: the prompt is empty")
        return given if word is None else f"{given}\n\n{read_text(word, missing=missing)}"
    text = read_text(word, missing=missing)
    if text == "":
        raise PromptError("the prompt is empty: give at least one character")
    if word not in (None, STDIN) and not sys.stdin.isatty() and (piped := _piped()):
        return f"{piped}\n\n{text}"
    return text


def _piped() -> str:
    return sys.stdin.buffer.read().decode("utf-8", errors="replace").rstrip("\n")


def _file_text(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8", errors="replace").rstrip("\n")
    except (OSError, ValueError, RuntimeError) as error:
        raise click.UsageError(f"-f {file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _is_alias(word: str) -> bool:
    from quire.weights.sources import ALIASES  # most verbs have no such words

    return word in ALIASES


def _exists(word: str) -> bool:
    try:
        return Path(word).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False
