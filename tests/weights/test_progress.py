import inspect

from quire.weights.progress import Progress, ignore_progress


def test_ignoring_takes_what_progress_takes() -> None:
    report: Progress = ignore_progress
    assert report("downloading", 1, None) is None  # type: ignore[func-returns-value]
    assert (
        list(inspect.signature(ignore_progress).parameters) == list(inspect.signature(Progress.__call__).parameters)[1:]
    )
