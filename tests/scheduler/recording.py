"""A scheduler's inputs and outputs as JSON lines, and the replay that must give the same schedules.

One line per call: the config, then each request added, aborted, finished, forked, each external token, each schedule,
and each update with the tokens sampled. So each decision of a scheduler can be examined without the model.
Next to read: `../../src/quire/scheduler/scheduler.py`.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from quire.config import SchedulerConfig
from quire.errors import ConfigError, EngineError
from quire.events import EventLog
from quire.scheduler.scheduler import Scheduler
from quire.types import (
    Request,
    RequestResult,
    RequestStatus,
    SchedulerOutput,
    SequenceUpdate,
    StepResult,
)


class ConfigRecord(msgspec.Struct, frozen=True, tag="config"):
    """First line: the scheduler's config."""

    config: SchedulerConfig


class AddRecord(msgspec.Struct, frozen=True, tag="add"):
    """`add_request`."""

    request: Request


class AbortRecord(msgspec.Struct, frozen=True, tag="abort"):
    """`abort`."""

    request_ids: tuple[str, ...]


class FinishRecord(msgspec.Struct, frozen=True, tag="finish"):
    """`finish`."""

    request_id: str
    status: RequestStatus
    stop_reason: int | str | None


class ForkRecord(msgspec.Struct, frozen=True, tag="fork"):
    """`fork`."""

    parent_id: str
    child: Request


class AppendRecord(msgspec.Struct, frozen=True, tag="append"):
    """`append_token`."""

    request_id: str
    token_id: int


class ResetRecord(msgspec.Struct, frozen=True, tag="reset"):
    """`reset_prefix_cache`."""


class ScheduleRecord(msgspec.Struct, frozen=True, tag="schedule"):
    """`schedule`, with the drafts set before it, and the step it decided."""

    output: SchedulerOutput
    alone: str | None = None
    step_tokens: int = 0
    drafts: dict[str, tuple[int, ...]] = {}
    """Request id → `Request.draft_token_ids`."""


class UpdateRecord(msgspec.Struct, frozen=True, tag="update"):
    """`update`. Of the results only the tokens: log-probabilities and embeddings decide nothing here."""

    step_id: int
    token_ids: dict[str, tuple[int, ...]]
    failed: dict[str, str] = {}
    """Request id → error."""
    is_lost: bool = False


Record = (
    ConfigRecord
    | AddRecord
    | AbortRecord
    | FinishRecord
    | ForkRecord
    | AppendRecord
    | ResetRecord
    | ScheduleRecord
    | UpdateRecord
)


class RecordingScheduler(Scheduler):
    """A `Scheduler` that writes every call that succeeds to a file. Close it, or use it in a `with`."""

    def __init__(
        self,
        config: SchedulerConfig,
        path: Path,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, events, clock)
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] = path.open("wb")
        self._write(ConfigRecord(config))

    def add_request(self, request: Request) -> None:
        """See `Scheduler`."""
        super().add_request(request)
        # Written afterwards, so that the arrival time is in it; queued requests are otherwise as they came.
        self._write(AddRecord(request))

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """See `Scheduler`."""
        listed = tuple(request_ids)
        ended = super().abort(listed)
        self._write(AbortRecord(listed))
        return ended

    def finish(self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None) -> list[Request]:
        """See `Scheduler`."""
        ended = super().finish(request_id, status, stop_reason)
        self._write(FinishRecord(request_id, status, stop_reason))
        return ended

    def fork(self, parent_id: str, child: Request) -> None:
        """See `Scheduler`."""
        super().fork(parent_id, child)
        self._write(ForkRecord(parent_id, child))

    def append_token(self, request_id: str, token_id: int) -> None:
        """See `Scheduler`."""
        super().append_token(request_id, token_id)
        self._write(AppendRecord(request_id, token_id))

    def reset_prefix_cache(self) -> bool:
        """See `Scheduler`."""
        done = super().reset_prefix_cache()
        self._write(ResetRecord())
        return done

    def schedule(self, alone: str | None = None, step_tokens: int = 0) -> SchedulerOutput:
        """See `Scheduler`."""
        requests = self._requests.by_id.values()
        drafts = {item.request_id: item.draft_token_ids for item in requests if item.draft_token_ids}
        output = super().schedule(alone, step_tokens)
        self._write(ScheduleRecord(output, alone, step_tokens, drafts))
        return output

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """See `Scheduler`."""
        updates = super().update(output, result)
        tokens = {item.request_id: item.token_ids for item in result.results}
        failed = {item.request_id: item.error for item in result.results if item.error is not None}
        self._write(UpdateRecord(output.step_id, tokens, failed, result.is_lost))
        return updates

    def close(self) -> None:
        """Finish the file; further calls are not possible."""
        self._file.close()

    def __enter__(self) -> "RecordingScheduler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, record: Record) -> None:
        self._file.write(self._encoder.encode(record) + b"\n")


def read_recording(path: Path) -> Iterator[Record]:
    """The records of a file, in order. Raises: ConfigError naming the first line that is not a record."""
    decoder = msgspec.json.Decoder(Record)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}, line {number}, is not part of a scheduler recording: {error}") from error


def read_outputs(path: Path) -> list[SchedulerOutput]:
    """Return the schedules of a recording, with as many decode iterations as there were.

    Executed in order they give the same tokens.
    """
    outputs: dict[int, SchedulerOutput] = {}
    for record in read_recording(path):
        if isinstance(record, ScheduleRecord):
            outputs[record.output.step_id] = record.output
        elif isinstance(record, UpdateRecord):
            output = outputs[record.step_id]
            lengths = [len(token_ids) + (name in record.failed) for name, token_ids in record.token_ids.items()]
            most = max(lengths, default=1)
            scheduled = [
                item if item.draft_token_ids else replace(item, max_new_tokens=min(item.max_new_tokens, max(1, most)))
                for item in output.scheduled
            ]
            outputs[record.step_id] = replace(output, scheduled=tuple(scheduled))
    return list(outputs.values())


def replay(path: Path) -> list[SchedulerOutput]:
    """Give a fresh scheduler the recorded inputs, and return its schedules.

    Raises: ConfigError if the file is no recording; EngineError at the first schedule that differs.
    """
    records = read_recording(path)
    first = next(records, None)
    if not isinstance(first, ConfigRecord):
        raise ConfigError(f"{path} is no scheduler recording: it does not start with a config")
    scheduler = Scheduler(first.config, clock=lambda: 0.0)
    outputs: dict[int, SchedulerOutput] = {}
    for record in records:
        if isinstance(record, ScheduleRecord):
            for request_id, drafts in record.drafts.items():
                scheduler._requests.by_id[request_id].draft_token_ids = drafts
            output = scheduler.schedule(record.alone, record.step_tokens)
            if output != record.output:
                raise EngineError(f"step {record.output.step_id} of {path} is scheduled otherwise: {output}")
            outputs[output.step_id] = output
        else:
            _apply(scheduler, record, outputs)
    return list(outputs.values())


def _apply(scheduler: Scheduler, record: Record, outputs: dict[int, SchedulerOutput]) -> None:
    match record:
        case AddRecord(request):
            scheduler.add_request(request)
        case AbortRecord(request_ids):
            scheduler.abort(request_ids)
        case FinishRecord(request_id, status, stop_reason):
            scheduler.finish(request_id, status, stop_reason)
        case ForkRecord(parent_id, child):
            scheduler.fork(parent_id, child)
        case AppendRecord(request_id, token_id):
            scheduler.append_token(request_id, token_id)
        case ResetRecord():
            scheduler.reset_prefix_cache()
        case UpdateRecord(step_id, token_ids, failed, is_lost):
            results = [RequestResult(name, tokens, error=failed.get(name)) for name, tokens in token_ids.items()]
            scheduler.update(outputs[step_id], StepResult(step_id, tuple(results), is_lost))
        case _:
            raise ConfigError("a scheduler recording holds a second config")
