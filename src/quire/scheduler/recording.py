"""A scheduler's inputs and outputs as JSON lines, and the replay that must give the same schedules.

One line per call: the config, then each request added, aborted, finished, forked, each external token, each schedule,
and each update with the tokens sampled. Whatever a scheduler decided can so be looked at again, far from the model.
Next to read: `scheduler.py`.
"""

import time
from collections import Counter
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
    """First line: what the scheduler obeyed."""

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
    """`schedule`, and what it decided."""

    output: SchedulerOutput
    alone: str | None = None
    step_tokens: int = 0


class UpdateRecord(msgspec.Struct, frozen=True, tag="update"):
    """`update`. Of the results only the tokens: log-probabilities and embeddings decide nothing here."""

    step_id: int
    token_ids: tuple[tuple[str, int | None], ...]
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
        output = super().schedule(alone, step_tokens)
        self._write(ScheduleRecord(output, alone, step_tokens))
        return output

    def update(self, output: SchedulerOutput, result: StepResult) -> list[SequenceUpdate]:
        """See `Scheduler`."""
        updates = super().update(output, result)
        tokens = tuple((item.request_id, item.token_id) for item in result.results)
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
    """The schedules of a recording, with as many rounds as there were: executed in order they give the same tokens."""
    outputs: list[SchedulerOutput] = []
    for record in read_recording(path):
        if isinstance(record, ScheduleRecord):
            outputs.append(record.output)
        elif isinstance(record, UpdateRecord):
            num_rounds = max(Counter(request_id for request_id, _ in record.token_ids).values(), default=1)
            outputs[-1] = replace(outputs[-1], max_rounds=num_rounds)
    return outputs


def replay(path: Path) -> list[SchedulerOutput]:
    """Give a fresh scheduler the recorded inputs, and return its schedules.

    Raises: ConfigError if the file is no recording; EngineError at the first schedule that differs.
    """
    records = read_recording(path)
    first = next(records, None)
    if not isinstance(first, ConfigRecord):
        raise ConfigError(f"{path} is no scheduler recording: it does not start with a config")
    scheduler = Scheduler(first.config, clock=lambda: 0.0)
    outputs: list[SchedulerOutput] = []
    for record in records:
        if isinstance(record, ScheduleRecord):
            outputs.append(scheduler.schedule(record.alone, record.step_tokens))
            if outputs[-1] != record.output:
                raise EngineError(f"step {record.output.step_id} of {path} is scheduled otherwise: {outputs[-1]}")
        else:
            _apply(scheduler, record, outputs)
    return outputs


def _apply(scheduler: Scheduler, record: Record, outputs: list[SchedulerOutput]) -> None:
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
            results = tuple(
                RequestResult(name, token_id, error=failed.get(name) if token_id is None else None)
                for name, token_id in token_ids
            )
            scheduler.update(outputs[-1], StepResult(step_id, results, is_lost))
        case _:
            raise ConfigError("a scheduler recording holds a second config")
