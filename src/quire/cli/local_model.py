"""A model's files, checkpoint and tokenizer without an engine and without torch: for `show` and `tokenize`.

Next to read: `show.py`, `tokenize.py`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.output import Output
from quire.cli.progress import show_progress
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer
    from quire.weights.checkpoint import Checkpoint


def open_model(name: str, revision: str | None, output: Output) -> "Checkpoint":
    """Fetch the model if it is not there yet, and open its checkpoint; weights are not read. Raises: ModelError."""
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.sources import resolve_source

    with show_progress(output) as progress:
        files = resolve_source(name, revision=revision, progress=progress)
    return open_checkpoint(files)


def open_tokenizer(checkpoint: "Checkpoint", source: str | None = None) -> "Tokenizer":
    """The tokenizer at `source` (a directory or its tokenizer.json), else the checkpoint's own.

    Raises: ConfigError, ModelError.
    """
    from quire.text.tokenizer import load_tokenizer_directory, load_tokenizer_gguf

    if source is not None:
        path = Path(source).expanduser()
        if not path.exists():
            raise ConfigError(f"tokenizer='{source}' does not exist: give a directory or a tokenizer.json")
        return load_tokenizer_directory(path if path.is_dir() else path.parent)
    if checkpoint.format == "gguf":
        return load_tokenizer_gguf(checkpoint.metadata)
    return load_tokenizer_directory(checkpoint.files.path)
