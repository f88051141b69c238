"""A tokenizer from a Hugging Face model directory.

Reads `tokenizer.json`, or `vocab.json` and `merges.txt` of the older byte-level tokenizers (OPT, GPT-2, Qwen2); then
`tokenizer_config.json` and `special_tokens_map.json` for special tokens, BOS and EOS; then the chat templates.
Must not know: weights, the model's configuration. Next to read: `tokenizer.py`.
"""

import base64
import binascii
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import pre_tokenizers

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.files import read_json_object, reading
from quire.text.tokenizer_parts import (
    TokenizerParts,
    add_bos_and_eos,
    build_byte_level,
    find_fim_tokens,
    find_pre_tokenization,
)

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BYTE_LEVEL_CLASSES = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
"""Pre-tokenization rules by class, for a directory that has only a vocabulary and merges."""
MAX_ID_LEN = 10
_CLASS_DEFAULTS = {
    "gpt-2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    "qwen2": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}


def build_directory_tokenizer(path: Path) -> TokenizerParts:
    """Build the tokenizer of the model directory `path`.

    Raises: ModelFileError for missing or malformed files; UnsupportedModelError for another format.
    """
    config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    roles = _special_tokens(config)
    if (path / "tokenizer.json").is_file():
        backend = _read_tokenizer_json(path / "tokenizer.json")
        if _class_name(path, config) in _BYTE_LEVEL_CLASSES and isinstance(config.get("add_prefix_space"), bool):
            _prefix_spaces(backend, adds=config["add_prefix_space"])
    elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        rules_name = _byte_level_rules(path, config)
        backend = _read_vocabulary_and_merges(path, rules_name, adds_space=config.get("add_prefix_space") is True)
        roles = {**_CLASS_DEFAULTS[rules_name], **roles}
    else:
        raise _no_tokenizer(path)
    with reading(path / "tokenizer_config.json"):
        _add_configured_tokens(path, backend, config, roles)
    roles = {name: token for name, token in roles.items() if backend.token_to_id(token) is not None}
    _follow_flags(path, backend, config, roles)
    return TokenizerParts(
        backend=backend,
        bos_token_id=backend.token_to_id(roles["bos_token"]) if "bos_token" in roles else None,
        eos_token_id=backend.token_to_id(roles["eos_token"]) if "eos_token" in roles else None,
        end_token_ids=frozenset(
            token_id
            for name in ("eot_token", "eom_token")
            if (token_id := backend.token_to_id(_token_text(config.get(name)) or "")) is not None
        ),
        template_variables=roles,
        chat_templates=directory_chat_templates(path),
        fim=find_fim_tokens(backend.token_to_id),
    )


def _follow_flags(
    path: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any], roles: Mapping[str, str]
) -> None:
    """Apply `add_bos_token` and `add_eos_token` unless tokenizer.json decides. Mutates: `backend`."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    # Models of these classes (DeepSeek-V2) rely on the flags with a tokenizer.json that adds nothing itself.
    by_class = str(config.get("tokenizer_class")).startswith(("Llama", "CodeLlama", "Gemma", "Cohere"))
    if by_class or not (path / "tokenizer.json").is_file():
        bos = roles.get("bos_token") if config.get("add_bos_token", by_class) else None
        eos = roles.get("eos_token") if config.get("add_eos_token", False) else None
        add_bos_and_eos(backend, bos=bos, eos=eos)


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    with reading(path):
        document = _read_text(path)
        if (fault := fault_of(document)) is not None:
            raise ModelFileError(f"damaged ({printable(fault)}); fetch it again")
        backend = tokenizers.Tokenizer.from_str(document)
    # Some files have the lengths of the training; a prompt must not be truncated or padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _class_name(path: Path, config: Mapping[str, Any]) -> str:
    """Return the tokenizer's class; without a name, what Transformers takes for the model type."""
    model = _read_json(path / "config.json")
    is_qwen = str(model.get("model_type")).startswith("qwen")
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    return str(name or ("Qwen2Tokenizer" if is_qwen else "GPT2Tokenizer")).removesuffix("Fast")


def _byte_level_rules(path: Path, config: Mapping[str, Any]) -> str:
    name = _class_name(path, config)
    if name not in _BYTE_LEVEL_CLASSES:
        raise UnsupportedModelError(
            f"{path} has vocab.json and merges.txt of a {name}; from these only {', '.join(_BYTE_LEVEL_CLASSES)} can "
            f"be built. {_CONVERSION.format(path=path)}"
        )
    return _BYTE_LEVEL_CLASSES[name]


def _read_vocabulary_and_merges(path: Path, rules_name: str, *, adds_space: bool) -> tokenizers.Tokenizer:
    vocab = _read_token_ids(path / "vocab.json")
    merges = []
    for number, line in enumerate(_read_text(path / "merges.txt").split("\n"), start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        pieces = line.split(" ")
        if len(pieces) != 2:
            raise ModelFileError(f"{path / 'merges.txt'} line {number} is {line[:40]!r}, not two pieces")
        merges.append((pieces[0], pieces[1]))
    return build_byte_level(vocab, merges, find_pre_tokenization(rules_name), adds_space=adds_space)


def _read_token_ids(path: Path) -> dict[str, int]:
    """Return the ids of tokens, none if there is no such file. Raises: ModelFileError for another value."""
    found = _read_json(path)
    for token, token_id in found.items():
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            shown = printable(repr(token_id), limit=40)
            raise ModelFileError(f"{path} gives {token[:40]!r} the id {shown}, not a token id")
    return found


def _prefix_spaces(backend: tokenizers.Tokenizer, *, adds: bool) -> None:
    """Make the byte-level step of a tokenizer.json add a leading space, or not. Mutates: `backend`."""
    found = backend.pre_tokenizer
    steps: Any = found if isinstance(found, pre_tokenizers.Sequence) else [found]
    for step in steps:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = adds


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    return {role: text for role in _ROLES if (text := _token_text(config.get(role)))}


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _add_configured_tokens(
    path: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any], roles: Mapping[str, str]
) -> None:
    """Add tokens that only the configuration names. Mutates: `backend`."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    extra = [*_listed(path, config, "additional_special_tokens"), *_listed(path, config, "extra_special_tokens")]
    special = {*roles.values(), *map(_token_text, extra)}
    decoder = config.get("added_tokens_decoder")
    if decoder is None:  # a file of older tools
        decoder = {
            token_id: {"content": token, "special": token in special, "normalized": token not in special}
            for token, token_id in _read_token_ids(path / "added_tokens.json").items()
        }
    if not isinstance(decoder, dict):
        kind = type(decoder).__name__
        raise ModelFileError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder is a {kind}, not a dict")
    for key, entry in sorted(decoder.items(), key=lambda item: int(item[0]) if _is_id(item[0]) else -1):
        content = _token_text(entry)
        if content is None or not _is_id(key):
            shown = f"{printable(repr(key), limit=40)}: {printable(repr(entry), limit=40)}"
            raise ModelFileError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder has the entry {shown}")
        if content in known:
            continue
        fields = entry if isinstance(entry, dict) else {}
        flags = {name: bool(fields.get(name, False)) for name in ("special", "lstrip", "rstrip", "single_word")}
        backend.add_tokens([tokenizers.AddedToken(content, normalized=bool(fields.get("normalized")), **flags)])
        known.add(content)
        if backend.token_to_id(content) != int(key):
            raise ModelFileError(
                f"{path / 'tokenizer_config.json'} gives {content!r} the id {key}, but in the vocabulary it has "
                f"{backend.token_to_id(content)}; the files do not belong together"
            )
    named = [*roles.values(), *(_token_text(token) for token in extra)]
    # A token outside the vocabulary would get an id that the model has no embedding for.
    added = [token for token in named if token and token not in known and backend.token_to_id(token) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in added])


def _is_id(key: Any) -> bool:
    return str(key).isdecimal() and len(str(key)) <= MAX_ID_LEN


def _listed(path: Path, config: Mapping[str, Any], name: str) -> list[Any]:
    """Return the tokens of a list, or of an object whose names are further roles. Raises: ModelFileError."""
    found = config.get(name) or []
    if not isinstance(found, list | dict):
        raise ModelFileError(
            f"{path / 'tokenizer_config.json'}: {name} is a {type(found).__name__}, not a list or an object"
        )
    return list(found.values()) if isinstance(found, dict) else found


def directory_chat_templates(path: Path) -> dict[str, str]:
    """Return a directory's templates by name: chat_template.jinja is the default, else that of the other files.

    Raises: ModelFileError.
    """
    value: Any = _read_json(path / "tokenizer_config.json").get("chat_template")
    if (path / "chat_template.jinja").is_file():
        value = _read_text(path / "chat_template.jinja")
    elif value is None:
        value = _read_json(path / "chat_template.json").get("chat_template")
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value or []
    try:
        templates = {str(entry["name"]): entry["template"] for entry in entries}
        is_text = all(isinstance(text, str) for text in templates.values())
    except (TypeError, KeyError):
        is_text = False
    if not is_text:
        raise ModelFileError(
            f"{path / 'tokenizer_config.json'}: chat_template is neither text nor a list of named texts"
        )
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path} is not UTF-8 text: byte {error.start} is wrong") from None


_CONVERSION = (
    "Write a tokenizer.json once with Transformers: AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')"
)


def _no_tokenizer(path: Path) -> Exception:
    if any(path.glob("*.model")) or any(path.glob("*.tiktoken")):
        return UnsupportedModelError(
            f"{path} has its tokenizer only as a SentencePiece or tiktoken model. {_CONVERSION.format(path=path)}"
        )
    return ModelFileError(f"{path} has no tokenizer.json (nor vocab.json with merges.txt); fetch the model again")


# --- Checks of a tokenizer.json, before the tokenizers library reads it ---------------------------
# The library trusts the file: some parts end the whole process, others make a gigabyte of each character of a text.
# What it notices itself, it reports when it reads or uses the file.

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
