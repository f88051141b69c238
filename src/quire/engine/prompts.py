"""Parser of prompts: text, token ids, or a dict of these; one prompt or a list of them.

Knows types and limits of prompts only; no tokenizer, no model. Next to read: `input_processor.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import PromptError, nearest

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
FORMS = "give text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """Text, token ids, or both: then the ids are computed and the text is only copied to the output."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str = ""


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Check and normalise one prompt. Raises: PromptError."""
    if isinstance(prompt, str):
        return ParsedPrompt(_text(prompt), None)
    if isinstance(prompt, dict):
        return _parse_dict(prompt)
    if isinstance(prompt, (bytes, bytearray)):
        raise PromptError("the prompt is bytes: decode it to text first")
    if isinstance(prompt, Sequence):
        return ParsedPrompt(None, _token_ids(prompt))
    hint = "call .tolist() on an array of token ids" if hasattr(prompt, "tolist") else FORMS
    raise PromptError(f"a prompt cannot be of type {type(prompt).__name__}: {hint}")


def split_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts: `[1, 2, 3]` is one prompt of token ids, `["a", "b"]` is two prompts."""
    if isinstance(prompts, (str, bytes, dict)) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(type(item) is int for item in prompts):
        return [prompts]
    return list(prompts)


def _parse_dict(prompt: dict[Any, Any]) -> ParsedPrompt:
    for key in prompt:
        if key not in PROMPT_KEYS:
            hint = nearest(str(key), PROMPT_KEYS)
            raise PromptError(f"unknown prompt key '{key}'{hint}; known are {', '.join(PROMPT_KEYS)}")
    text, token_ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
    if text is None and token_ids is None:
        raise PromptError("the prompt has neither 'prompt' nor 'prompt_token_ids'")
    if salt is not None and not isinstance(salt, str):
        raise PromptError(f"cache_salt must be a string, got {type(salt).__name__}")
    if token_ids is None:
        return ParsedPrompt(_text(text), None, salt or "")
    if text is not None and not isinstance(text, str):
        raise PromptError(f"'prompt' must be text, got {type(text).__name__}")
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
        raise PromptError(f"'prompt_token_ids' must be a list of integers, got {type(token_ids).__name__}")
    return ParsedPrompt(text, _token_ids(token_ids), salt or "")


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise PromptError(f"'prompt' must be text, got {type(text).__name__}")
    if not text:
        raise PromptError("the prompt is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid Unicode: lone surrogate at character {error.start}") from None
    return text


def _token_ids(values: Sequence[Any]) -> list[int]:
    token_ids = list(values)
    if not token_ids:
        raise PromptError("the prompt is empty: give at least one token id")
    for position, value in enumerate(token_ids):
        if type(value) is not int:
            raise PromptError(f"token ids must be integers, got {type(value).__name__} at position {position}; {FORMS}")
    return token_ids
