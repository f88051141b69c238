"""Faults on demand, to test what handles them: `QUIRE_FAULTS="raise-in-step:token=7;slow-step:ms=50"`.

Wrappers around the executor and the tokenizer. `sitecustomize.py` beside this file puts them into the engine process of
a server that was started with this folder on PYTHONPATH.

| fault | effect |
| --- | --- |
| `raise-in-step:token=T` | a step that computes token T raises: alternately after it was computed, and before |
| `nan-logits:token=T` | tokens after T in the same request are NaN, also after its KV came from the prefix cache |
| `raise-in-output:token=T` | reading the text of token T raises: the token can be computed, but not shown |
| `exhaust-memory:step=N` | the Nth step raises MemoryError |
| `slow-step:ms=M` | each step takes M milliseconds longer |
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.adapter import Adapter
from quire.text.tokenizer import Tokenizer
from quire.types import RequestResult, SchedulerOutput, StepResult

if TYPE_CHECKING:
    from quire.parallel.executor import Executor

logger = logging.getLogger("quire.engine")
KNOWN_FAULTS = {
    "raise-in-step": "token",
    "nan-logits": "token",
    "raise-in-output": "token",
    "exhaust-memory": "step",
    "slow-step": "ms",
}
"""Fault → the one value that it takes."""
NAN_ERROR = "no token can be chosen: the logits hold NaN, because QUIRE_FAULTS is set"


class InjectedError(RuntimeError):
    """Raised by `raise-in-step` and `raise-in-output`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to cause: its name in `KNOWN_FAULTS`, and the value of its argument."""

    name: str
    value: int


def parse_faults(setting: str) -> list[Fault]:
    """Read a value of `QUIRE_FAULTS`. Raises: ValueError."""
    faults = []
    for part in filter(None, (item.strip() for item in setting.split(";"))):
        name, _, argument = part.partition(":")
        key, _, value = argument.partition("=")
        if KNOWN_FAULTS.get(name) != key:
            raise ValueError(f"QUIRE_FAULTS: {part!r}; known are {KNOWN_FAULTS}")
        faults.append(Fault(name, int(value)))
    return faults


class FaultyExecutor:
    """Executor that passes its calls on to another one, and causes the faults."""

    def __init__(self, executor: "Executor", faults: Sequence[Fault]) -> None:
        self._executor = executor
        self._faults = tuple(faults)
        self.max_in_flight = executor.max_in_flight
        self._submitted: deque[SchedulerOutput] = deque()
        self._token_ids: dict[str, list[int]] = {}
        self._awaiting_ids: set[str] = set()
        """Requests whose next token the scheduler sends."""
        self._num_steps = 0
        self._num_raised = 0
        logger.warning("QUIRE_FAULTS is set, so this engine fails on purpose: %s", self._faults)

    def read_adapters(self, wanted: Sequence[Adapter], wait_s: float) -> set[str]:
        """See `Executor`."""
        return self._executor.read_adapters(wanted, wait_s)

    def submit(self, output: SchedulerOutput) -> None:
        """See `Executor`."""
        if output.forgets_all:
            self._submitted.clear()
        self._submitted.append(output)

    def collect(self) -> StepResult:
        """See `Executor`. Raises: InjectedError, MemoryError."""
        output = self._submitted.popleft()
        try:
            result = self._execute(output)
        except BaseException:
            self._submitted.clear()
            raise
        for item in result.results:
            if item.request_id in self._token_ids and item.request_id not in self._awaiting_ids:
                self._token_ids[item.request_id] += item.token_ids
        return result

    def _execute(self, output: SchedulerOutput) -> StepResult:
        self._num_steps += 1
        self._take_up(output)
        for value in self._values("slow-step"):
            time.sleep(value / 1000)
        if self._num_steps in self._values("exhaust-memory"):
            raise MemoryError("QUIRE_FAULTS: no memory for this step")
        raises = self._meets_token(output)
        self._num_raised += raises
        if not raises or self._num_raised % 2 == 0:
            # One iteration: faults are counted in steps, and a fatal token must be seen before it is computed.
            scheduled = [
                msgspec.structs.replace(item, max_new_tokens=min(item.max_new_tokens, 1 + len(item.draft_token_ids)))
                for item in output.scheduled
            ]
            self._executor.submit(msgspec.structs.replace(output, scheduled=tuple(scheduled)))
            result = self._executor.collect()
        if raises:
            raise InjectedError("QUIRE_FAULTS: this step raises")
        return self._with_nan(output, result)

    def end_step_early(self) -> None:
        """See `Executor`."""
        self._executor.end_step_early()

    def shutdown(self) -> None:
        """See `Executor`."""
        self._executor.shutdown()

    def _values(self, name: str) -> set[int]:
        return {fault.value for fault in self._faults if fault.name == name}

    def _take_up(self, output: SchedulerOutput) -> None:
        forgotten = tuple(self._token_ids) if output.forgets_all else (*output.preempted_ids, *output.finished_ids)
        for request_id in forgotten:
            self._token_ids.pop(request_id, None)
        for new in output.new_requests:
            self._token_ids[new.request_id] = list(new.token_ids)
            (self._awaiting_ids.add if new.awaits_external_token else self._awaiting_ids.discard)(new.request_id)
        for item in output.scheduled:
            self._token_ids[item.request_id] += item.new_token_ids

    def _meets_token(self, output: SchedulerOutput) -> bool:
        wanted = self._values("raise-in-step")
        for item in output.scheduled:
            stop = item.num_computed_tokens + item.num_tokens
            if not wanted.isdisjoint(self._token_ids[item.request_id][item.num_computed_tokens : stop]):
                return True
        return False

    def _with_nan(self, output: SchedulerOutput, result: StepResult) -> StepResult:
        wanted = self._values("nan-logits")
        if not wanted:
            return result
        damaged = {
            item.request_id
            for item in output.scheduled
            if not wanted.isdisjoint(self._token_ids[item.request_id][: item.num_computed_tokens + item.num_tokens])
        }
        results = tuple(
            RequestResult(item.request_id, error=NAN_ERROR) if item.request_id in damaged else item
            for item in result.results
        )
        return msgspec.structs.replace(result, results=results)


class FaultyTokenizer(Tokenizer):
    """Tokenizer that raises when it decodes one of some tokens; otherwise it does what the given one does."""

    def __init__(self, tokenizer: Tokenizer, faults: Sequence[Fault]) -> None:
        # In place of the base class's: nothing is read anew.
        self.__dict__.update(tokenizer.__dict__)
        self._bad_ids = {fault.value for fault in faults if fault.name == "raise-in-output"}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer`. Raises: InjectedError."""
        self._check(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """See `Tokenizer`. Raises: InjectedError."""
        self._check([token_id])
        return super().token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """See `Tokenizer`. Raises: InjectedError."""
        self._check([token_id])
        return super().token_text(token_id)

    def _check(self, ids: Sequence[int]) -> None:
        if not self._bad_ids.isdisjoint(ids):
            raise InjectedError("QUIRE_FAULTS: this token has no text")
