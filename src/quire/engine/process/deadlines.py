"""Requests that may wait only so long for their first step. Next to read: `child.py`."""

from collections.abc import Iterable


class QueueDeadlines:
    """Until when each request must have been scheduled. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._deadlines_s: dict[str, float] = {}
        self._earliest_s = float("inf")

    def __len__(self) -> int:
        return len(self._deadlines_s)

    def add(self, request_id: str, deadline_s: float) -> None:
        """Watch a request."""
        self._deadlines_s[request_id] = deadline_s
        self._earliest_s = min(self._earliest_s, deadline_s)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These were scheduled, or have ended; unknown ids are ignored."""
        for request_id in request_ids:
            self._deadlines_s.pop(request_id, None)

    def expired(self, now_s: float) -> list[str]:
        """Take out and return those whose time is up."""
        if now_s < self._earliest_s:
            return []
        expired = [request_id for request_id, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]
        self.forget(expired)
        self._earliest_s = min(self._deadlines_s.values(), default=float("inf"))
        return expired
