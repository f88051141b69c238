"""`moving_average`: the average of measured times and rates that follows their changes."""

NEWEST = 0.2
"""Weight of the newest value."""


def moving_average(before: float | None, newest: float) -> float:
    """Return the moving average with a new value; None or 0: there is none yet."""
    if not before:
        return newest
    # One step during which the machine stood still must not count as if all were so.
    return before + NEWEST * (min(newest, 2 * before) - before)
