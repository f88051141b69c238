"""Who may start computing: bounded numbers of requests and prompt tokens that wait or run.

`Admission.enter` is called once per request, by `generation.generate`. Next to read: `generation.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from quire.server.caller import Caller


class Admission:
    """Counts what is in the server. For one event loop."""

    def __init__(self) -> None:
        self.num_requests = 0

    def check_room(self, caller: Caller, num_requests: int) -> None:
        """Refuse early, before a request is tokenised. Raises: ApiError 429."""

    @contextmanager
    def enter(self, caller: Caller, num_prompt_tokens: int, num_completions: int) -> Iterator[None]:
        """Hold a place while the body runs. Raises: ApiError 429 with `Retry-After`."""
        self.num_requests += num_completions
        try:
            yield
        finally:
            self.num_requests -= num_completions
