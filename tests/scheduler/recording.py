"""A scheduler that records its calls, and the replay on a fresh one, which must decide the same schedules."""

import copy
from collections.abc import Callable
from typing import Any

import msgspec

from quire.scheduler.scheduler import Scheduler
from quire.types import SchedulerOutput

RECORDED = ("add_request", "abort", "finish", "fork", "append_token", "reset_prefix_cache", "schedule", "update")


class RecordingScheduler(Scheduler):
    """A `Scheduler` that records every call that succeeds: its name, arguments, and the drafts set before it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, tuple[int, ...]]]] = []
        self.outputs: list[SchedulerOutput] = []
        """The steps decided, as another process would receive them."""


def _recorded(name: str) -> Callable[..., Any]:
    plain = getattr(Scheduler, name)

    def call(self: RecordingScheduler, *arguments: Any) -> Any:
        requests = self.requests.by_id.values()
        drafts = {item.request_id: item.draft_token_ids for item in requests if item.draft_token_ids}
        result = plain(self, *arguments)
        # Copied afterwards, so that the arrival time is in it.
        self.calls.append((name, copy.deepcopy(arguments), drafts))
        if name == "schedule":
            self.outputs.append(msgspec.json.decode(msgspec.json.encode(result), type=SchedulerOutput))
        return result

    return call


for _name in RECORDED:
    setattr(RecordingScheduler, _name, _recorded(_name))


def replay(recorded: RecordingScheduler) -> list[SchedulerOutput]:
    """Give a fresh scheduler the recorded calls. Returns its schedules; fails at the first that differs."""
    scheduler, outputs = Scheduler(recorded.config, clock=lambda: 0.0), []
    for name, arguments, drafts in recorded.calls:
        for request_id, token_ids in drafts.items():
            scheduler.requests.by_id[request_id].draft_token_ids = token_ids
        result = getattr(scheduler, name)(*copy.deepcopy(arguments))
        if name == "schedule":
            assert result == recorded.outputs[len(outputs)], "the step is scheduled otherwise"
            outputs.append(result)
    return outputs
