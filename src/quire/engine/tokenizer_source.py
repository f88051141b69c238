"""Choice of tokenizer and chat template: those the user names, else the model's. Must not import torch.

Next to read: `text/tokenizer.py`.
"""

import re
from pathlib import Path

from quire.errors import ChatTemplateError, ConfigError
from quire.files import reading
from quire.text.chat_template import compile_chat_template
from quire.text.directory_tokenizer import directory_chat_templates
from quire.text.gguf_tokenizer import gguf_chat_templates
from quire.text.tokenizer import Tokenizer, load_tokenizer_directory, load_tokenizer_gguf
from quire.weights.checkpoint import Checkpoint
from quire.weights.gguf_file import read_gguf
from quire.weights.sources import ModelFiles

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def load_tokenizer(checkpoint: Checkpoint, source: str | None = None, model_vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer at `source` (a directory or its tokenizer.json), or the checkpoint's own.

    With `model_vocab_size` it refuses text with tokens that the model has no embedding for.
    Raises: ConfigError, ModelError.
    """
    path = checkpoint.files.path if source is None else _directory(source)
    with reading(path):
        if source is None and checkpoint.files.kind == "gguf":
            return load_tokenizer_gguf(checkpoint.metadata, model_vocab_size=model_vocab_size)
        return load_tokenizer_directory(path, model_vocab_size=model_vocab_size)


def has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Return whether a model has files of a tokenizer: a shape without weights may have none."""
    path = checkpoint.files.path
    directory = path if path.is_dir() else path.parent
    is_preset = checkpoint.files.origin == "preset"
    return checkpoint.files.kind == "gguf" or (
        not is_preset and any((directory / name).is_file() for name in TOKENIZER_FILES)
    )


def has_chat_template(files: ModelFiles, source: str | None = None) -> bool:
    """Return whether the tokenizer at `source`, or the model's own, has a chat template, without building it.

    Raises: ConfigError, ModelError.
    """
    if source is None and files.kind == "gguf":
        return bool(gguf_chat_templates(read_gguf(files.path).metadata))
    return bool(directory_chat_templates(files.path if source is None else _directory(source)))


def _directory(source: str) -> Path:
    path = Path(source).expanduser()
    if not path.is_dir() and (path.name != "tokenizer.json" or not path.exists()):
        problem = "is no directory" if path.exists() else "does not exist"
        raise ConfigError(f"tokenizer='{source}' {problem}: give a directory or its tokenizer.json")
    return path if path.is_dir() else path.parent


def read_chat_template(value: str | None) -> str | None:
    """Return the template that the option gives: its text, the content of the file it names, or a template's name.

    A plain word that is no file is the name of one of the model's templates, which `Dialogue` checks.
    Raises: ConfigError for a file that cannot be read or a template that does not parse.
    """
    if value is None or (re.fullmatch(r"[\w-]+", value) and not Path(value).exists()):
        return value
    text = value
    if "{" not in value and "\n" not in value:
        try:
            text = Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"chat_template='{value}' is neither a Jinja template nor a readable file: {reason}"
            ) from None
    try:
        compile_chat_template(text)
    except ChatTemplateError as error:
        shown = value if len(value) <= 60 and "\n" not in value else "…"
        raise ConfigError(
            f"chat_template='{shown}': {error.message}; correct it, or leave the option out to use the model's own"
        ) from None
    return text
