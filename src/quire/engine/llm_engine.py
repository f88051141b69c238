"""The engine: requests in, one step at a time, outputs out.

`LLMEngine.step` = schedule → submit → collect → update → outputs. One thread drives an engine; `AsyncLLM` has such a
thread. Knows no tensors and no model: an executor computes. Next to read: `output_processor.py`, `scheduler.py`.
"""

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig, EngineOptions
from quire.drafts.drafting import Drafting
from quire.engine.input_processor import InputProcessor, PreparedRequest
from quire.engine.isolation import Isolation
from quire.engine.output_processor import Output, OutputProcessor
from quire.engine.stall import Stall
from quire.errors import DeadlineError, EngineDeadError, PromptError, QuireError
from quire.events import EventKind, EventLog
from quire.grammar.compiler import GrammarCompiler
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler.pace import Pace
from quire.scheduler.request import Request, SequenceUpdate
from quire.scheduler.scheduler import Scheduler
from quire.text.tokenizer import Tokenizer
from quire.types import RequestStatus, SchedulerOutput, StepResult

if TYPE_CHECKING:
    from quire.parallel.executor import Executor

StepWatcher = Callable[[SchedulerOutput, StepResult], None]
ASLEEP = "the model is asleep: wake_up() loads it again"


class LLMEngine:
    """Requests of any kind through one scheduler and one executor.

    Drive it with `add_request`, then `step` while `has_unfinished_requests()`. Each accepted request gets exactly
    one output with `finished`, also when it is aborted or the engine fails. Attributes for readers: `config`,
    `scheduler`, `events`, `tokenizer`, `startup_times` (phase → seconds), `chat_template` (None: the tokenizer's own);
    `watch_executor(tell)`: from then on any thread calls `tell` with the error if the executor dies between steps.
    `watcher`, `op_period`, `is_asleep`: set by `watch` and `sleep`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: "Executor",
        tokenizer: Tokenizer | None = None,
        events: EventLog | None = None,
        *,
        chat_template: str | None = None,
        scheduler: Scheduler | None = None,
        grammars: GrammarCompiler | None = None,
        startup_times: dict[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`scheduler`: made by the caller, with the same events; `grammars`: the executor's compiler."""
        if config.scheduler.max_in_flight != executor.max_in_flight:
            config = replace(config, scheduler=replace(config.scheduler, max_in_flight=executor.max_in_flight))
        self.config = config
        self.chat_template = chat_template
        self.events = EventLog(config.options.max_num_events) if events is None else events
        stored = getattr(executor, "stored_blocks", ())
        self.scheduler = scheduler or Scheduler(config.scheduler, self.events, clock, stored=stored)
        self.input_processor = InputProcessor(config, tokenizer, clock, grammars)
        self.startup_times = startup_times or {}
        self.watch(None)
        self.is_asleep = False
        self.dead_error: EngineDeadError | None = None
        self.tokenizer = tokenizer
        self._executor, self._clock = executor, clock
        self.watch_executor: Callable[[Any], None] = getattr(executor, "watch", lambda tell: None)
        self._output_processor = OutputProcessor(tokenizer)
        self._isolation = Isolation(self.scheduler, self.events, self._output_processor.caller_of)
        self._ended: list[Output] = []
        self._stall = Stall(executor, self.scheduler, reads_adapters=config.options.has_adapters)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._pace, self._drafting = Pace(), Drafting(config)
        self._is_shut_down = False

    @classmethod
    def from_options(cls, model: str = "smollm2", **kwargs: Any) -> "LLMEngine":
        """Load a model by the fields of `EngineOptions`. Raises: ConfigError, ModelError, CapacityError."""
        return cls.build(EngineOptions.from_kwargs(model, **kwargs))

    @classmethod
    def build(cls, options: EngineOptions, **given: Any) -> "LLMEngine":
        """Load a model and make an engine for it. `given`: as of `load_parts`. Raises: as `from_options`."""
        from quire.engine.build import load_parts  # imports the kernels

        engine = cls(**load_parts(options, **given)._asdict())
        if options.kv_disk is not None:
            atexit.register(_shut_down, weakref.ref(engine))  # programs that never do so keep their blocks too
        return engine

    # --- Requests -------------------------------------------------------------------------
    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        client_id: str = "",
        cache_salt: str = "",
        arrival_time_s: float | None = None,
        **choices: Any,
    ) -> None:
        """Check and queue one request; `params` None: the model's recommended. `choices`: `lora_request`, `deadline_s`.

        Raises: RequestError, CapacityError, EngineDeadError. After an error nothing of the request is left.
        """
        choices |= {"priority": priority, "client_id": client_id, "cache_salt": cache_salt}
        self.submit(self.input_processor.prepare(request_id, prompt, params, arrival_time_s=arrival_time_s, **choices))

    def submit(self, prepared: PreparedRequest) -> None:
        """Queue a checked request. Raises: DuplicateRequestError, CapacityError, EngineDeadError, or EngineError if the
        prompt's text cannot be made."""
        self.check_health()
        self._output_processor.add(prepared)
        try:
            self.scheduler.add_request(prepared.request)
        except BaseException:
            self._output_processor.discard(prepared.request.request_id)
            raise

    def abort_request(self, request_ids: str | Iterable[str], error: QuireError | None = None) -> None:
        """End requests now, free what they hold; unknown and finished ids are ignored.

        The next `step` or `take_ended` returns their final outputs, with `finish_reason` "abort" and the error.
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if request_id in self._output_processor:
                self.scheduler.abort(self._output_processor.sequence_ids(request_id))
                self._ended.append(self._output_processor.end(request_id, "abort", self._clock(), error))

    def take_ended(self) -> list[Output]:
        """Return the final outputs of aborted requests that no call has returned yet."""
        ended, self._ended = self._ended, []
        return ended

    def abort_all(self) -> None:
        """End every unfinished request, those of beam search included."""
        self.abort_request(self._output_processor.request_ids)
        self.scheduler.abort(list(self.scheduler.requests.by_id))

    def watch(self, watcher: StepWatcher | None, op_period: int = 0) -> None:
        """Give each step to `watcher` before its STEP event, in place of another; one step in `op_period` times its
        instructions (0: none)."""
        self.watcher, self.op_period = watcher, op_period

    def end_step_early(self) -> None:
        """Ask the running step to end after its current decode iteration: a message waits. For any thread."""
        self._executor.end_step_early()

    # --- Steps ----------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Submit steps up to the executor's `max_in_flight` and take the result of the oldest one.

        Returns: for each request that got a token or ended, all of its text so far, or what is new (`tells_news`). A
        request ends alone, with `finish_reason` "error", if its result is an error, the executor raises on it alone, or
        its text cannot be made; "abort" at its deadline. If it raises on any, all end. Raises: EngineDeadError then.
        """
        self.check_health()
        started = self._clock()
        try:
            if overdue := self._output_processor.overdue(started):
                self.abort_request(overdue, DeadlineError())
            self._submit_steps()
            if not self._in_flight:
                return self.take_ended()
            schedule, scheduled = self._in_flight[0], self._clock()
            result = self._collect(schedule)
            executed = self._clock()
            updates = self.scheduler.update(self._in_flight.popleft(), result)
            if result.is_lost:
                self._in_flight.clear()
            outputs = self._make_outputs(updates, executed)
        except Exception as error:
            return self.fail(error)
        except BaseException:
            # An interrupted step may have been computed or not, so no request can go on.
            self.abort_all()
            self._give_up_steps()
            raise
        ended, num_tokens = self._clock(), schedule.num_tokens * result.num_iterations
        kind: dict[str, Any] = {"num_iterations": result.num_iterations, "has_prompts": schedule.has_prompts}
        self._pace.note(num_tokens, ended - started, **kind)
        drafts = self._drafting.note_step(schedule, result, updates, ended - started, has_prompts=kind["has_prompts"])
        if self.watcher is not None:
            self.watcher(schedule, result)
        if result.op_times:
            self.events.record(EventKind.OPS, time_s=ended, step_id=schedule.step_id, ops=result.op_times)
        self.events.record(
            EventKind.STEP,
            step_id=schedule.step_id,
            num_tokens=num_tokens,
            num_requests=len(schedule.scheduled),
            **kind,
            duration_s=ended - started,
            time_s=ended,
            schedule_s=scheduled - started,
            execute_s=executed - scheduled,
            output_s=ended - executed,
            **drafts,
        )
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return True if `step` has something to compute or to return."""
        return bool(self._ended or self._in_flight) or self.scheduler.has_unfinished

    def _submit_steps(self) -> None:
        suspect_id = self._isolation.suspect_id() if self._isolation.is_active else None
        most = self.scheduler.config.max_in_flight if suspect_id is None else 1
        running: Sequence[Request] = () if suspect_id else self.scheduler.requests.running
        self._drafting.give_drafts(running, overlaps=bool(self._in_flight))
        if self._stall.reads_adapters:
            self._stall.read_adapters()
        while len(self._in_flight) < most:
            schedule = self.scheduler.schedule(suspect_id, self._pace.step_tokens, self._pace.tokens_per_s)
            if not (schedule.scheduled or schedule.awaits_transfers):
                break
            self._output_processor.note_scheduled(schedule.new_requests, self._clock())
            if self.op_period and schedule.step_id % self.op_period == 0:
                schedule = schedule.with_op_times()
            self._in_flight.append(schedule)
            self._executor.submit(schedule)
            self._stall.num_steps = 0
        if not self._in_flight:
            self._stall.note()

    def _collect(self, schedule: SchedulerOutput) -> StepResult:
        try:
            result = self._executor.collect()
        except Exception as error:
            if isinstance(error, EngineDeadError):
                raise
            return self._isolation.judge(schedule, error)
        if self._isolation.is_active:
            self._isolation.note(result)
        return result

    def _give_up_steps(self) -> None:
        """Tell the scheduler that the steps in flight will have no results."""
        if self._in_flight:
            schedule = self._in_flight[0]
            self._in_flight.clear()
            self.scheduler.update(schedule, StepResult(schedule.step_id, (), is_lost=True))

    def _make_outputs(self, updates: list[SequenceUpdate], now_s: float) -> list[Output]:
        outputs, endings = self._output_processor.process(updates, now_s)
        for ending in endings:
            self.scheduler.finish(ending.sequence_id, ending.status, ending.stop_string)
        for update in updates:
            if update.request.observer is not None:
                update.request.observer(update)
        return self.take_ended() + outputs

    def fail(self, cause: Exception) -> list[Output]:
        """End every request because of `cause`: the engine is dead from now on. Returns: the final outputs."""
        self.dead_error = EngineDeadError(f"the engine stopped after {type(cause).__name__}: {cause}")
        self.dead_error.__cause__ = cause
        now_s = self._clock()
        end, ids = self._output_processor.end, self._output_processor.request_ids
        outputs = [*self.take_ended(), *(end(request_id, "error", now_s, self.dead_error) for request_id in ids)]
        try:
            for sequence_id in tuple(self.scheduler.requests.by_id):
                self.scheduler.finish(sequence_id, RequestStatus.FINISHED_ERROR)
            self._give_up_steps()
        except Exception as error:
            # If the scheduler itself is broken its blocks are lost with it; the outputs must still be returned.
            self.dead_error.add_note(f"while ending requests: {type(error).__name__}: {error}")
        return outputs

    # --- State ----------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """True if the engine is dead."""
        return self.dead_error is not None

    def check_health(self) -> None:
        """Raises: EngineDeadError, with the cause chained, if the engine is dead or was shut down."""
        if self.dead_error is not None:
            raise self.death()
        if self._is_shut_down:
            raise EngineDeadError(ASLEEP if self.is_asleep else "the engine was shut down: make a new one")

    def death(self) -> EngineDeadError:
        """Return a fresh copy of `dead_error`, for one caller: a raised exception collects that caller's traceback."""
        assert self.dead_error is not None
        error = EngineDeadError(self.dead_error.message)
        error.__cause__ = self.dead_error.__cause__
        return error

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises: PromptError if the engine runs on token ids alone."""
        if self.tokenizer is None:
            raise PromptError("this engine has no tokenizer: it takes and returns token ids; tokenizer=DIR names one")
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, without any effect, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def sleep(self) -> None:
        """Shut down for good, in favour of an engine that is made when the model wakes up."""
        self.shutdown()
        self.is_asleep = True

    def shutdown(self) -> list[Output]:
        """Abort everything and let the executor go; returns the final outputs. Calling it again does nothing."""
        if self._is_shut_down:
            return []
        self._is_shut_down = True
        self.abort_all()
        if (last := self.scheduler.schedule_last()).transfers and not self.errored:
            self._executor.submit(last)
            self._executor.collect()
        self._executor.shutdown()
        return self.take_ended()


def _shut_down(reference: "weakref.ref[LLMEngine]") -> None:
    if (engine := reference()) is not None:
        engine.shutdown()
