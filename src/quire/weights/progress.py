"""`Progress`: the callback for the progress of a download. It must not know terminals.

Next to read: `sources.py`.
"""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""Called during a download, from any thread, with a few words for people, the bytes done, and all bytes if known."""


def ignore_progress(stage: str, done_bytes: int, total_bytes: int | None) -> None:
    """Drop the report."""
