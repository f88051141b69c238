"""The engine: requests in, one step at a time, outputs out.

`LLMEngine.step` = schedule → execute → update → outputs. Everything else here adds requests, takes them away, or
decides what happens when a step fails. One thread drives an engine; `AsyncLLM` brings that thread for others.
Knows no tensors and no model: an executor computes. Next to read: `output_processor.py`, `scheduler/scheduler.py`.
"""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig, EngineOptions
from quire.engine.input_processor import InputProcessor, PreparedRequest
from quire.engine.isolation import Isolation
from quire.engine.output_processor import Output, OutputProcessor
from quire.engine.pace import STEP_S, Pace
from quire.errors import EngineDeadError, EngineError, PromptError
from quire.events import EventKind, EventLog
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.text.tokenizer import Tokenizer
from quire.types import RequestStatus, SchedulerOutput, SequenceUpdate, StepResult

if TYPE_CHECKING:
    from quire.parallel.executor import Executor  # it imports torch, which an engine with a fake executor never needs

MAX_IDLE_STEPS = 1000
"""Steps in a row that compute nothing while requests wait: more means that the scheduler is stuck."""

Observer = Callable[[SequenceUpdate], None]


class LLMEngine:
    """Requests of any kind through one scheduler and one executor.

    Drive it with `add_request`, then `step` while `has_unfinished_requests()`. Each accepted request gets exactly
    one output with `finished`, also when it is aborted or the engine fails. Attributes for readers: `config`,
    `scheduler`, `events`, `tokenizer`, `startup_times` (phase → seconds), `chat_template` (None: the tokenizer's own).
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`scheduler`: one made by the caller, such as a `RecordingScheduler`, with the same events."""
        self.config = config
        self.chat_template = chat_template
        self.events = EventLog(config.options.max_num_events) if events is None else events
        self.scheduler = Scheduler(config.scheduler, self.events, clock) if scheduler is None else scheduler
        self.input_processor = InputProcessor(config, tokenizer, clock)
        self.startup_times: dict[str, float] = {}
        self.dead_error: EngineDeadError | None = None
        self.tokenizer = tokenizer
        self._executor = executor
        self._output_processor = OutputProcessor(tokenizer)
        self._isolation = Isolation(self.scheduler, self.events, self._output_processor.caller_of)
        self._observers: dict[str, Observer] = {}
        self._ended: list[Output] = []
        self._num_idle_steps = 0
        self._clock = clock
        self._step_started_s = 0.0
        self._pace = Pace()
        self._has_news: Callable[[], bool] = lambda: False
        self._is_shut_down = False
        executor.watch(self._ends_step)

    @classmethod
    def from_options(cls, model: str = "smollm2", **kwargs: Any) -> "LLMEngine":
        """Load a model; keyword arguments are the fields of `EngineOptions`.

        Raises: ConfigError, ModelError, CapacityError.
        """
        options = EngineOptions.from_kwargs(model, **kwargs)
        from quire.engine.build import build_engine  # imports torch, and this file

        return build_engine(options)

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
    ) -> None:
        """Check and queue one request; `params` None means the model's recommended sampling.

        Raises: RequestError, CapacityError, EngineDeadError. After an error nothing of the request is left.
        """
        self.submit(
            self.input_processor.prepare(
                request_id,
                prompt,
                params,
                priority=priority,
                client_id=client_id,
                cache_salt=cache_salt,
                arrival_time_s=arrival_time_s,
            )
        )

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

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests now, free what they hold; unknown and finished ids are ignored.

        The next `step` or `take_ended` returns their final outputs, with `finish_reason` "abort".
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if request_id in self._output_processor:
                self.scheduler.abort(self._output_processor.sequence_ids(request_id))
                self._ended.append(self._output_processor.abort(request_id, self._clock()))

    def take_ended(self) -> list[Output]:
        """Final outputs of aborted requests that nothing has returned yet."""
        ended, self._ended = self._ended, []
        return ended

    def abort_all(self) -> None:
        """End every request in flight, observed ones included."""
        self.abort_request(self._output_processor.request_ids)
        self.scheduler.abort(list(self._observers))
        self._observers.clear()

    def observe(self, request_id: str, observer: Observer) -> None:
        """Send the updates of a request that was given to `scheduler` directly to `observer` (beam search)."""
        self._observers[request_id] = observer

    def forget_observed(self, request_id: str) -> None:
        """No more updates of this request are wanted."""
        self._observers.pop(request_id, None)

    def watch(self, has_news: Callable[[], bool]) -> None:
        """A step of several rounds ends early when `has_news`: somebody waits for this engine's driver."""
        self._has_news = has_news

    # --- Steps ----------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Compute one step of all running requests.

        Returns: for each request that got a token or ended, all of its text so far. A request whose own result is
        an error ends alone, with `finish_reason` "error", and so does one that the executor raises on, or whose text
        cannot be made. When the executor raises whoever runs, the final outputs of all requests have that reason; the
        engine is dead from then on.
        Raises: EngineDeadError if it was dead before.
        """
        self.check_health()
        started = self._step_started_s = self._clock()
        try:
            schedule = self.scheduler.schedule(self._isolation.suspect_id(), self._pace.step_tokens)
            scheduled = self._clock()
            self._output_processor.note_scheduled(schedule.new_requests, scheduled)
            result = self._execute(schedule)
            executed = self._clock()
            updates = self.scheduler.update(schedule, result)
            outputs = self._make_outputs(updates, executed)
        except Exception as error:
            return self.fail(error)
        except BaseException:
            # An interrupted step may have been computed or not, so nothing in flight can go on.
            self.abort_all()
            raise
        ended = self._clock()
        num_rounds = result.num_rounds
        num_tokens = schedule.num_tokens * num_rounds
        has_prompts = any(item.num_tokens > 1 for item in schedule.scheduled)
        self._pace.note(num_tokens, ended - started, num_rounds=num_rounds, has_prompts=has_prompts)
        if result.op_times:
            self.events.record(EventKind.OPS, step_id=schedule.step_id, ops=result.op_times)
        self.events.record(
            EventKind.STEP,
            step_id=schedule.step_id,
            num_tokens=num_tokens,
            num_requests=len(schedule.scheduled),
            num_rounds=num_rounds,
            has_prompts=has_prompts,
            duration_s=ended - started,
            schedule_s=scheduled - started,
            execute_s=executed - scheduled,
            output_s=ended - executed,
        )
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to compute or to return."""
        return bool(self._ended) or self.scheduler.has_unfinished

    def _execute(self, schedule: SchedulerOutput) -> StepResult:
        if schedule.scheduled:
            self._num_idle_steps = 0
            try:
                result = self._executor.execute_model(schedule)
            except EngineDeadError:
                raise
            except Exception as error:
                return self._isolation.judge(schedule, error)
            self._isolation.note(result)
            return result
        self._num_idle_steps += 1
        if self._num_idle_steps > MAX_IDLE_STEPS and self.scheduler.num_waiting:
            raise EngineError(f"{self.scheduler.num_waiting} requests wait, but none can be scheduled")
        return StepResult(schedule.step_id, ())

    def _ends_step(self, num_rounds: int) -> bool:
        foreseen_s = (self._clock() - self._step_started_s) * (num_rounds + 1) / num_rounds
        return foreseen_s > STEP_S or self._has_news()

    def _make_outputs(self, updates: list[SequenceUpdate], now_s: float) -> list[Output]:
        outputs, endings = self._output_processor.process(updates, now_s)
        for ending in endings:
            self.scheduler.finish(ending.sequence_id, ending.status, ending.stop_string)
        if self._observers:
            for update in updates:
                observer = self._observers.get(update.request.request_id)
                if observer is not None:
                    observer(update)
        return self.take_ended() + outputs

    def fail(self, cause: Exception) -> list[Output]:
        """End everything because of `cause`: the engine is dead from now on. Returns: the final outputs."""
        self.dead_error = EngineDeadError(f"the engine stopped after {type(cause).__name__}: {cause}")
        self.dead_error.__cause__ = cause
        now_s = self._clock()
        outputs = self.take_ended()
        for request_id in self._output_processor.request_ids:
            for sequence_id in self._output_processor.sequence_ids(request_id):
                self._release(sequence_id)
            outputs.append(self._output_processor.fail(request_id, self.dead_error.message, now_s))
        for sequence_id in self._observers:
            self._release(sequence_id)
        self._observers.clear()
        return outputs

    def _release(self, sequence_id: str) -> None:
        try:
            self.scheduler.finish(sequence_id, RequestStatus.FINISHED_ERROR)
        except Exception as error:
            # Where the scheduler itself is broken its blocks are lost with it; the outputs must still go out.
            assert self.dead_error is not None
            self.dead_error.add_note(f"while ending {sequence_id}: {type(error).__name__}: {error}")

    # --- State ----------------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        return self.dead_error is not None

    def check_health(self) -> None:
        """Raises: EngineDeadError, with the cause chained, if the engine is dead or was shut down."""
        if self.dead_error is not None:
            raise self.death()
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down: make a new one")

    def death(self) -> EngineDeadError:
        """A fresh copy of `dead_error`, for one caller: a raised exception collects that caller's traceback."""
        assert self.dead_error is not None
        error = EngineDeadError(self.dead_error.message)
        error.__cause__ = self.dead_error.__cause__
        return error

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises: PromptError if the engine runs on token ids alone."""
        if self.tokenizer is None:
            raise PromptError("this engine has no tokenizer: it takes and returns token ids")
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def shutdown(self) -> list[Output]:
        """Abort everything and let the executor go; returns the final outputs. Calling it again does nothing."""
        if self._is_shut_down:
            return []
        self._is_shut_down = True
        self.abort_all()
        ended = self.take_ended()
        self._executor.shutdown()
        return ended
