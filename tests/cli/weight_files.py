"""`make_weights`: a file of packed weights in the cache, which is on disk."""

from pathlib import Path

from quire.runtime.shared_file import Header, SharedFile, Unfinished, find_or_begin, finish
from quire.weights.model_cache import cache_directory
from quire.weights.model_files import ignore_progress

NUM_BYTES = 5000


def make_weights(name: str, source: str) -> Path:
    """Return the path of a new file for the model of this name, packed from `source`."""
    path = cache_directory() / "weights" / f"{name}.weights"
    place = SharedFile(path, Header("key", name, source, 0, NUM_BYTES, "quire 1"))
    unfinished = find_or_begin(place, None, ignore_progress)
    assert isinstance(unfinished, Unfinished)
    unfinished.memory[:] = 7
    unfinished.publish()
    finish()
    return path
