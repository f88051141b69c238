"""`[MODEL] [PROMPT]`: which of a verb's words is the model and which the text, and piped text.

`quire run "Why is the sky blue?"` prompts the default model; `quire run smollm2 "…"` names one. Next to read: `run.py`.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quire.config import EngineOptions
from quire.errors import PromptError
from quire.weights.sources import ALIASES

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
        as_text = "" if self.model in ALIASES or _exists(self.model) else f"; {prompt_form(self.model)}"
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
    if word in ALIASES:
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


def _exists(word: str) -> bool:
    try:
        return Path(word).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False
