"""`Progress`: the callback for the progress of a download. It must not know terminals.

Next to read: `sources.py`.
"""

from typing import Protocol


class Progress(Protocol):
    """A function that is called during a download, from the thread that waits for it or from a worker thread."""

    def __call__(self, stage: str, done_bytes: int, total_bytes: int | None) -> None:
        """`stage` is a few words for people; `total_bytes` is None while unknown."""


def ignore_progress(stage: str, done_bytes: int, total_bytes: int | None) -> None:
    """Drop the report."""
