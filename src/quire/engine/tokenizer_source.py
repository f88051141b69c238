"""Choice of tokenizer and chat template: those the user names, else the model's. Must not import torch.

Next to read: `text/tokenizer.py`.
"""

from pathlib import Path

from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer, load_tokenizer_directory, load_tokenizer_gguf
from quire.weights.checkpoint import Checkpoint


def load_tokenizer(checkpoint: Checkpoint, source: str | None = None, model_vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer at `source` (a directory or its tokenizer.json), or the checkpoint's own.

    With `model_vocab_size` it refuses text with tokens that the model has no embedding for.
    Raises: ConfigError, ModelError.
    """
    if source is not None:
        path = Path(source).expanduser()
        if not path.is_dir() and (path.name != "tokenizer.json" or not path.exists()):
            problem = "is no directory" if path.exists() else "does not exist"
            raise ConfigError(f"tokenizer='{source}' {problem}: give a directory or its tokenizer.json")
        directory = path if path.is_dir() else path.parent
        return load_tokenizer_directory(directory, model_vocab_size=model_vocab_size)
    if checkpoint.format == "gguf":
        return load_tokenizer_gguf(checkpoint.metadata, model_vocab_size=model_vocab_size)
    return load_tokenizer_directory(checkpoint.files.path, model_vocab_size=model_vocab_size)


def read_chat_template(value: str | None) -> str | None:
    """Return the option's value if it is a template, else the content of the file it names."""
    if value is None or "{" in value or "\n" in value:
        return value
    path = Path(value).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"chat_template='{value}' is neither a Jinja template nor a readable file: {reason}"
        ) from None
