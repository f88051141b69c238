"""Which tokenizer a model gets: the one the user names, else the checkpoint's own. Must not import torch.

Next to read: `text/tokenizer.py`.
"""

from pathlib import Path

from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer, load_tokenizer_directory, load_tokenizer_gguf
from quire.weights.checkpoint import Checkpoint


def load_tokenizer(checkpoint: Checkpoint, source: str | None = None, model_vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer at `source` (a directory or its tokenizer.json), or the checkpoint's own.

    With `model_vocab_size` it refuses text with tokens that the model has no embedding for.
    Raises: ConfigError, ModelError.
    """
    if source is not None:
        path = Path(source).expanduser()
        if not path.exists():
            raise ConfigError(f"tokenizer='{source}' does not exist: give a directory or its tokenizer.json")
        directory = path if path.is_dir() else path.parent
        return load_tokenizer_directory(directory, model_vocab_size=model_vocab_size)
    if checkpoint.format == "gguf":
        return load_tokenizer_gguf(checkpoint.metadata, model_vocab_size=model_vocab_size)
    return load_tokenizer_directory(checkpoint.files.path, model_vocab_size=model_vocab_size)
