"""Checks of a tokenizer.json, before the tokenizers library reads it.

The library trusts the file: some parts end the whole process, others make a gigabyte of each character of a text. What
it notices itself, it reports when it reads or uses the file. Must not know: `Tokenizer`. Next to read:
`directory_tokenizer.py`.
"""

import base64
import binascii
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.errors import printable

MAX_STEPS = 64
"""Most steps of normalisation, of splitting, of adding special tokens or of decoding."""
MAX_GROWTH = 64
"""Most characters that normalisation makes of one, and most that a step of decoding writes."""
MAX_WORD_CHARACTERS = 1000
"""Largest `max_input_chars_per_word`: a word takes the cube of its length."""


class _Model(msgspec.Struct):
    type: Any = None
    continuing_subword_prefix: Any = None
    max_input_chars_per_word: Any = 0


class _Document(msgspec.Struct):
    """The parts that are checked. The library says what is wrong with the type of another value."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None
    model: _Model = msgspec.field(default_factory=_Model)


def fault_of(document: str) -> str | None:
    """Return what is wrong with a tokenizer.json that would harm the program; None if nothing is."""
    try:
        found = msgspec.json.decode(document, type=_Document)
    except (msgspec.MsgspecError, RecursionError) as error:
        return str(error)
    if found.model.type != "WordPiece" and found.model.continuing_subword_prefix:
        return "the model has continuing_subword_prefix, which only WordPiece may have"
    if _number(found.model.max_input_chars_per_word) > MAX_WORD_CHARACTERS:
        return f"max_input_chars_per_word is larger than {MAX_WORD_CHARACTERS}"
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = [*_steps(getattr(found, name))]
        if len(steps) > MAX_STEPS:
            return f"{name} has {len(steps)} steps, more than {MAX_STEPS}"
        growth = math.prod(map(_growth, steps)) if name == "normalizer" else max(map(_growth, steps), default=1)
        if growth > MAX_GROWTH:
            return f"{name} makes {growth:.3g} characters of one, more than {MAX_GROWTH}"
        for step in steps:
            if (fault := _fault_of_step(step)) is not None:
                return f"{name} of type {printable(str(step.get('type')), limit=40)}: {fault}"
    return None


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part, of which a `Sequence` has several."""
    if not isinstance(part, dict):
        return
    nested = [item for key, item in part.items() if key in ("normalizers", "pretokenizers", "processors", "decoders")]
    if part.get("type") != "Sequence" or not nested:
        yield part
    for items in nested:
        for item in items if isinstance(items, list) else ():
            yield from _steps(item)


def _growth(step: dict[str, Any]) -> float:
    """Return how many characters a step makes of one, at most."""
    if step.get("type") == "Prepend":
        return max(1, len(str(step.get("prepend"))))
    if step.get("type") != "Replace":
        return 1
    pattern = step.get("pattern")
    plain = pattern.get("String") if isinstance(pattern, dict) else None
    replaced_len = len(plain) if isinstance(plain, str) else 1
    return max(1.0, len(str(step.get("content"))) / max(1, replaced_len))


def _fault_of_step(step: dict[str, Any]) -> str | None:
    for form in (step.get("single"), step.get("pair")):
        pieces = form if isinstance(form, list) else []
        texts = [piece["Sequence"] for piece in pieces if isinstance(piece, dict) and "Sequence" in piece]
        names = [str(text.get("id")) for text in texts if isinstance(text, dict)]
        if len(pieces) > MAX_STEPS or len(names) > len(set(names)):
            return f"it repeats the text, or has more than {MAX_STEPS} pieces"
    special = step.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else ():
        if isinstance(token, dict) and len(token.get("ids") or ()) > MAX_STEPS:
            return f"a special token stands for more than {MAX_STEPS} ids"
    charsmap = step.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        try:
            data = base64.b64decode(charsmap)
        except (binascii.Error, ValueError):
            return "precompiled_charsmap is not base64"
        if int.from_bytes(data[:4], "little") > len(data):
            return "precompiled_charsmap is cut off"
    return None


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else math.inf
