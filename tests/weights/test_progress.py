from quire.weights.progress import Progress, ignore_progress


def test_ignoring_takes_what_progress_takes() -> None:
    report: Progress = ignore_progress
    report("downloading", 1, None)
    report("downloading", 1, 2)
