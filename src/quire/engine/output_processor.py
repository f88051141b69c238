"""Turns the updates of a step into the outputs that callers see: `RequestOutput` and `PoolingRequestOutput`.

Keeps one record per request of the caller, with its `n` sequences, until the request has had its one terminal
output. A sequence is detokenised piece by piece and searched for stop strings. Knows no scheduler: it is given updates,
and returns the sequences that end because of their text. If a text cannot be made, its sequence fails alone.
Next to read: `llm_engine.py`.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.engine.input_processor import PreparedRequest
from quire.errors import DuplicateRequestError, EngineError, QuireError
from quire.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    PoolingRequestOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from quire.scheduler.request import Request, SequenceUpdate
from quire.text.detokenizer import IncrementalDetokenizer, StopStringMatcher
from quire.text.tokenizer import Tokenizer
from quire.types import NewRequest, RequestResult, RequestStatus, TokenLogprobs

logger = logging.getLogger("quire.engine")
Output = RequestOutput | PoolingRequestOutput
TokenText = Callable[[int], str]
"""Token id → the text of the token alone, special tokens included; U+FFFD for a part of a character."""


def describe(position: TokenLogprobs, token_text: TokenText) -> PositionLogprobs:
    """Return token id → `Logprob`; the token that was chosen comes first, then the likeliest."""
    columns = zip(position.token_ids, position.logprobs, position.ranks, strict=True)
    return {token_id: Logprob(logprob, rank, token_text(token_id)) for token_id, logprob, rank in columns}


class SequenceOutput:
    """Text, log-probabilities and end of one sequence, one of the `n` completions of a request.

    `text` is what may be shown: a tail that may become a stop string or the rest of a character is held back.
    `num_told`: characters and tokens that `news` has told; None after the end was told.
    """

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None, token_text: TokenText) -> None:
        params = request.sampling
        assert params is not None
        self.request = request
        self._params = params
        self.index = index
        self.text = ""
        self.num_tokens = 0
        self.num_told: tuple[int, int] | None = (0, 0)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.error_code: str | None = None
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._logprob_sum = 0.0
        self._token_text = token_text
        self._detokenizer: IncrementalDetokenizer | None = None
        self._matcher: StopStringMatcher | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            if params.stop_strings:
                self._matcher = StopStringMatcher(params.stop_strings, params.include_stop_str_in_output)

    def add(self, result: RequestResult, token_ids: tuple[int, ...], status: RequestStatus) -> None:
        """Append the tokens of one step, up to the token that completes a stop string.

        `status`: of the request after the last token. If the scheduler has ended it there (EOS, stop token, length),
        that end is taken over, unless a stop string ends it at an earlier token.
        """
        for index, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            if result.logprobs and self.logprobs is not None:
                values = result.logprobs[index - 1]
                self.logprobs.append(describe(values, self._token_text))
                self._logprob_sum += values.logprobs[0]
            is_last = index == len(token_ids)
            # The token that ends a text is listed but not shown, unless stop strings are shown as well.
            hidden = (
                is_last and status is RequestStatus.FINISHED_STOPPED and not self._params.include_stop_str_in_output
            )
            matched = None if hidden or self._detokenizer is None else self._show(self._detokenizer.append(token_id))
            if is_last and status.is_finished:
                self.finish(status.finish_reason or "error", self.request.stop_reason, flush=matched is None)
            elif matched is not None:
                self.finish("stop", matched, flush=False)
                return

    def finish(
        self,
        reason: str,
        stop_reason: int | str | None = None,
        *,
        error: str | None = None,
        error_code: str | None = None,
        flush: bool = True,
    ) -> None:
        """End the sequence. `flush` shows what was held back; it may still complete a stop string, which is cut."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.error, self.error_code = error, error_code
        if flush and self._detokenizer is not None:
            matched = self._show(self._detokenizer.finish())
            if matched is None and self._matcher is not None:
                self.text += self._matcher.finish()
        self._detokenizer = self._matcher = None

    def news(self) -> list[CompletionOutput]:
        """Return the completion with the text and tokens since the last call; none if there is nothing new."""
        if self.num_told is None or (self.finish_reason is None and self.num_tokens == self.num_told[1]):
            return []
        found = self.snapshot(*self.num_told)
        self.num_told = (len(self.text), self.num_tokens) if self.finish_reason is None else None
        return [found]

    def snapshot(self, first_character: int = 0, first_token: int = 0) -> CompletionOutput:
        """Return the completion so far. Its lists are copies: later steps do not change an output already returned.

        A copy of 1,000 token ids takes about 2 µs, and outputs of requests that do not stream are not made at all.
        """
        return CompletionOutput(
            index=self.index,
            text=self.text[first_character:],
            token_ids=self.request.output_token_ids[first_token : self.num_tokens],
            cumulative_logprob=None if self.logprobs is None else self._logprob_sum,
            logprobs=None if self.logprobs is None else self.logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            error_code=self.error_code,
        )

    def _show(self, delta: str) -> str | None:
        """Show what may be shown of the new text. Returns the stop string that it completes, if any."""
        if not delta:
            return None
        # Stop strings count from the first token after min_tokens.
        if self._matcher is None or self.num_tokens <= self._params.min_tokens:
            self.text += delta
            return None
        released = self._matcher.append(delta)
        self.text += released.text
        return released.matched


class Ending(NamedTuple):
    """A sequence that ends because of its text: the scheduler must finish it so."""

    sequence_id: str
    status: RequestStatus
    stop_string: int | str | None = None


class OutputProcessor:
    """Records of all requests in flight. Not for several threads."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        # At most one text per token of the vocabulary is kept.
        self._token_text: TokenText = (lambda _: "") if tokenizer is None else functools.cache(tokenizer.token_text)
        self._by_sequence: dict[str, tuple[_Record, SequenceOutput | None]] = {}
        """A request has the id of its first sequence."""
        self._next_deadline_s = math.inf

    def __contains__(self, request_id: str) -> bool:
        found = self._by_sequence.get(request_id)
        return found is not None and found[0].request.request_id == request_id

    @property
    def request_ids(self) -> list[str]:
        """Requests without a terminal output yet."""
        return [record.request.request_id for record in self._records()]

    def _records(self) -> "Iterable[_Record]":
        return dict.fromkeys(record for record, _ in self._by_sequence.values())

    def sequence_ids(self, request_id: str) -> list[str]:
        """Return the scheduler's names of a request's sequences that have not ended."""
        record = self._by_sequence[request_id][0]
        return [item.request.request_id for item in record.unfinished] if record.sequences else [request_id]

    def overdue(self, now_s: float) -> list[str]:
        """Return the requests whose deadline has passed."""
        if now_s < self._next_deadline_s:
            return []
        specs = [record.request.spec for record in self._records()]
        deadlines_s = {spec.request_id: spec.deadline_time_s or math.inf for spec in specs}
        self._next_deadline_s = min((time_s for time_s in deadlines_s.values() if time_s > now_s), default=math.inf)
        return [request_id for request_id, time_s in deadlines_s.items() if time_s <= now_s]

    def caller_of(self, sequence_id: str) -> str:
        """Return the caller's request that a sequence belongs to; a beam, which is unknown here, is its own."""
        found = self._by_sequence.get(sequence_id)
        return sequence_id if found is None else found[0].request.request_id

    def add(self, prepared: PreparedRequest) -> None:
        """Start a record. Raises: DuplicateRequestError if the id, or that of a sibling, is in use; EngineError if the
        prompt's text cannot be made."""
        request = prepared.request
        sequences = [request, *request.siblings]
        for sequence in sequences:
            if sequence.request_id in self._by_sequence:
                raise DuplicateRequestError(
                    f"request id '{sequence.request_id}' is in use by a running request: choose another, or wait"
                )
        try:
            outputs = [
                SequenceOutput(sequence, index, self._tokenizer, self._token_text)
                for index, sequence in enumerate(sequences if request.sampling is not None else ())
            ]
        except Exception as error:
            raise EngineError(_explain(request.request_id, error)) from error
        record = _Record(prepared, outputs)
        if request.sampling is None:
            self._by_sequence[request.request_id] = (record, None)
        if request.spec.deadline_time_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, request.spec.deadline_time_s)
        for output in outputs:
            self._by_sequence[output.request.request_id] = (record, output)

    def discard(self, request_id: str) -> None:
        """Forget a request that was not accepted after all, or has ended."""
        record = self._by_sequence[request_id][0]
        for name in [sequence.request.request_id for sequence in record.sequences] or [request_id]:
            del self._by_sequence[name]

    def note_scheduled(self, new_requests: Iterable[NewRequest], now_s: float) -> None:
        """Requests that run for the first time get their `first_scheduled_time_s`."""
        for new in new_requests:
            found = self._by_sequence.get(new.request_id)
            if found is not None and found[0].metrics.first_scheduled_time_s is None:
                found[0].metrics.first_scheduled_time_s = now_s

    def process(self, updates: Iterable[SequenceUpdate], now_s: float) -> tuple[list[Output], list[Ending]]:
        """Apply one step's updates.

        Returns: the outputs of requests that got a token or ended, and the sequences that the scheduler must finish:
        they met a stop string, or their text could not be made.
        """
        endings: list[Ending] = []
        touched: dict[_Record, None] = {}
        outputs: list[Output] = []
        for update in updates:
            request, result = update.request, update.result
            found = self._by_sequence.get(request.request_id)
            if found is None:
                continue
            record, sequence = found
            if sequence is None:
                if result.error is not None:
                    outputs.append(self._end_pooling(record, (), "error", result.error, result.error_code))
                elif result.embedding is not None:
                    outputs.append(self._end_pooling(record, result.embedding, "stop"))
                continue
            try:
                is_touched = self._take(record, sequence, update, now_s)
            except Exception as error:
                sequence.finish("error", error=_explain(request.request_id, error), flush=False)
                is_touched = True
            if is_touched:
                touched[record] = None
                if sequence.finish_reason is not None and not request.status.is_finished:
                    has_stopped = sequence.finish_reason == "stop"
                    status = RequestStatus.FINISHED_STOPPED if has_stopped else RequestStatus.FINISHED_ERROR
                    endings.append(Ending(request.request_id, status, sequence.stop_reason))
        for record in touched:
            is_running = record.sequences[0].finish_reason is None or record.unfinished
            if not is_running:
                outputs.append(self._end(record, now_s))
            elif record.prepared.streams:
                outputs.append(record.output(finished=False))
        return outputs, endings

    def _take(self, record: "_Record", sequence: SequenceOutput, update: SequenceUpdate, now_s: float) -> bool:
        """Apply one sequence's update. Returns True if its request has something new to show."""
        result, request = update.result, update.request
        if result.prompt_logprobs:
            record.add_prompt_logprobs(update, self._token_text)
        if sequence.finish_reason is not None:
            return False
        if update.new_token_ids:
            record.note_token(now_s)
            status = request.status if result.error is None else RequestStatus.RUNNING
            sequence.add(result, update.new_token_ids, status)
        if result.error is not None and sequence.finish_reason is None:
            sequence.finish("error", error=result.error, error_code=result.error_code)
        return bool(update.new_token_ids) or result.error is not None

    def end(self, request_id: str, reason: str, now_s: float, error: QuireError | None = None) -> Output:
        """Return the terminal output of a request that was aborted or cannot go on (`error`)."""
        message, code = (None, None) if error is None else (error.message, error.code)
        record = self._by_sequence[request_id][0]
        if not record.sequences:
            return self._end_pooling(record, (), reason, message, code)
        for sequence in record.unfinished:
            try:
                sequence.finish(reason, error=message, error_code=code)
            except Exception as text_error:
                explained = _explain(sequence.request.request_id, text_error)
                sequence.finish("error", error=message or explained, error_code=code, flush=False)
        return self._end(record, now_s)

    def _end(self, record: "_Record", now_s: float) -> RequestOutput:
        self.discard(record.request.request_id)
        output = record.output(finished=True)
        metrics = output.metrics = record.metrics
        metrics.arrival_time_s = record.request.arrival_time_s
        metrics.finished_time_s = now_s
        metrics.num_preemptions = sum(sequence.request.num_preemptions for sequence in record.sequences)
        return output

    def _end_pooling(
        self,
        record: "_Record",
        embedding: Iterable[float],
        reason: str,
        error: str | None = None,
        code: str | None = None,
    ) -> PoolingRequestOutput:
        self.discard(record.request.request_id)
        return PoolingRequestOutput(
            request_id=record.request.request_id,
            prompt_token_ids=record.request.prompt_token_ids,
            outputs=EmbeddingOutput(list(embedding)),
            num_cached_tokens=record.request.num_cached_tokens,
            finish_reason=reason,
            error=error,
            error_code=code,
        )


def _explain(request_id: str, error: Exception) -> str:
    """Log an error in making a text. Returns the message for the caller."""
    logger.error("request %r fails: its text cannot be made", request_id, exc_info=error)
    return f"the text of this request could not be made ({type(error).__name__}); the engine's log says more"


class _Record:
    """Record of a caller's request: its sequences, its prompt's log-probabilities and its times.

    It holds `prepared.grammar`, so that the grammar stays compiled.
    """

    def __init__(self, prepared: PreparedRequest, sequences: list[SequenceOutput]) -> None:
        request = prepared.request
        self.request: Request = request
        self.prepared = prepared
        self.sequences = sequences
        self.metrics = RequestMetrics(request.arrival_time_s)
        self.has_told = False
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        if request.sampling is not None and request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * request.num_prompt_tokens

    @property
    def unfinished(self) -> list[SequenceOutput]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def note_token(self, now_s: float) -> None:
        """Note that a token came at `now_s`."""
        if self.metrics.first_token_time_s is None:
            self.metrics.first_token_time_s = now_s
        self.metrics.last_token_time_s = now_s

    def add_prompt_logprobs(self, update: SequenceUpdate, token_text: TokenText) -> None:
        """Place the values of a chunk that ends at the last computed position that has a next prompt token.

        After a preemption the same positions come again, from a sibling too, which has the same prompt.
        """
        assert self.prompt_logprobs is not None
        stop = min(update.num_computed_tokens, self.request.num_prompt_tokens - 1) + 1
        start = stop - len(update.result.prompt_logprobs)
        for position, values in zip(range(start, stop), update.result.prompt_logprobs, strict=True):
            self.prompt_logprobs[position] = describe(values, token_text)

    def output(self, *, finished: bool) -> RequestOutput:
        """Return all text and tokens so far, or what is new."""
        prompt_logprobs = self.prompt_logprobs
        if self.prepared.tells_news:
            outputs = [item for sequence in self.sequences for item in sequence.news()]
            prompt_logprobs = None if self.has_told else prompt_logprobs
            self.has_told = True
        else:
            outputs = [sequence.snapshot() for sequence in self.sequences]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.request.num_cached_tokens,
        )
