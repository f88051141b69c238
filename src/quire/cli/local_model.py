"""A model's files, checkpoint and tokenizer without an engine and without torch: for `show` and `tokenize`.

Next to read: `show.py`, `tokenize.py`.
"""

from typing import TYPE_CHECKING

from quire.cli.output import Output
from quire.cli.progress import show_progress

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
    """Load the tokenizer at `source` (a directory or its tokenizer.json), else the checkpoint's own.

    Raises: ConfigError, ModelError.
    """
    from quire.engine.tokenizer_source import load_tokenizer

    return load_tokenizer(checkpoint, source)
