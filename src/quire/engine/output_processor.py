"""Turns the updates of a step into the outputs that callers see: `RequestOutput` and `PoolingRequestOutput`.

Keeps one record per request of the caller, with its `n` sequences, until the request has had its one terminal
output. A sequence is detokenised piece by piece and searched for stop strings. Knows no scheduler: it is given updates,
and returns the sequences that end because of their text. If a text cannot be made, its sequence fails alone.
Next to read: `llm_engine.py`.
"""

import logging
from collections.abc import Iterable
from typing import NamedTuple

from quire.engine.input_processor import PreparedRequest
from quire.errors import DuplicateRequestError, EngineError
from quire.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    PoolingRequestOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.stop_strings import StopStringMatcher
from quire.text.tokenizer import Tokenizer
from quire.types import NewRequest, Request, RequestResult, RequestStatus, SequenceUpdate, TokenLogprobs

logger = logging.getLogger("quire.engine")
Output = RequestOutput | PoolingRequestOutput


class TokenTexts:
    """Decodes tokens one by one, once each: at most one entry per token of the vocabulary is kept.

    A token that is only part of a character decodes to U+FFFD. Without a tokenizer all texts are empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the text of the token alone, special tokens included."""
        found = self._texts.get(token_id)
        if found is None:
            if self._tokenizer is None:
                return ""
            found = self._tokenizer.token_text(token_id)
            self._texts[token_id] = found
        return found

    def describe(self, position: TokenLogprobs) -> PositionLogprobs:
        """Return token id → `Logprob`; the token that was chosen comes first, then the likeliest."""
        columns = zip(position.token_ids, position.logprobs, position.ranks, strict=True)
        return {token_id: Logprob(logprob, rank, self.text(token_id)) for token_id, logprob, rank in columns}


class SequenceOutput:
    """Text, log-probabilities and end of one sequence, one of the `n` completions of a request.

    `text` is what may be shown: a tail that may become a stop string or the rest of a character is held back.
    """

    __slots__ = (
        "_detokenizer", "_final", "_matcher", "_params", "_token_texts", "cumulative_logprob", "error",
        "error_code", "finish_reason", "index", "logprobs", "num_tokens", "request", "stop_reason", "text",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None, token_texts: TokenTexts) -> None:
        params = request.sampling
        assert params is not None
        self.request = request
        self._params = params
        self.index = index
        self.text = ""
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.error_code: str | None = None
        wants_logprobs = params.logprobs is not None
        self.logprobs: list[PositionLogprobs] | None = [] if wants_logprobs else None
        self.cumulative_logprob: float | None = 0.0 if wants_logprobs else None
        self._final: CompletionOutput | None = None
        self._token_texts = token_texts
        self._detokenizer: IncrementalDetokenizer | None = None
        self._matcher: StopStringMatcher | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            if params.stop_strings:
                self._matcher = StopStringMatcher(params.stop_strings, params.include_stop_str_in_output)

    def add(self, result: RequestResult, token_ids: tuple[int, ...], status: RequestStatus) -> str | None:
        """Append the tokens of one step. Returns the stop string that ended the sequence, if any.

        `status`: of the request after the last token. If the scheduler has ended it there (EOS, stop token, length),
        that end is taken over, unless a stop string ends it at an earlier token.
        """
        for index, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            if result.logprobs and self.logprobs is not None and self.cumulative_logprob is not None:
                values = result.logprobs[index - 1]
                self.logprobs.append(self._token_texts.describe(values))
                self.cumulative_logprob += values.logprobs[0]
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
                return matched
        return None

    def finish(self, reason: str, stop_reason: int | str | None = None, *, flush: bool = True) -> None:
        """End the sequence. `flush` shows what was held back; it may still complete a stop string, which is cut."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if flush and self._detokenizer is not None:
            matched = self._show(self._detokenizer.finish())
            if matched is None and self._matcher is not None:
                self.text += self._matcher.finish()
        self._detokenizer = self._matcher = None

    def fail(self, error: str, error_code: str | None = None, *, flush: bool = True) -> None:
        """End the sequence because of an error; what it has so far stays. `flush` as in `finish`."""
        self.error = error
        self.error_code = error_code
        self.finish("error", flush=flush)

    def snapshot(self) -> CompletionOutput:
        """Return the completion so far. Its lists are copies: later steps do not change an output already returned.

        A copy of 1,000 token ids takes about 2 µs, and outputs of requests that do not stream are not made at all.
        """
        if self._final is not None:
            return self._final
        taken = CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.request.output_token_ids[: self.num_tokens],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            error_code=self.error_code,
        )
        if self.finish_reason is not None:
            self._final = taken
        return taken

    def _show(self, delta: str) -> str | None:
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
    stop_string: str | None = None


class OutputProcessor:
    """Records of all requests in flight. Not for several threads."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._token_texts = TokenTexts(tokenizer)
        self._records: dict[str, _Record] = {}
        self._by_sequence: dict[str, tuple[_Record, SequenceOutput | None]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._records

    @property
    def request_ids(self) -> list[str]:
        """Requests without a terminal output yet."""
        return list(self._records)

    def sequence_ids(self, request_id: str) -> list[str]:
        """The scheduler's names of a request's sequences that have not ended."""
        record = self._records[request_id]
        if not record.sequences:
            return [request_id]
        return [item.request.request_id for item in record.unfinished]

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
                SequenceOutput(sequence, index, self._tokenizer, self._token_texts)
                for index, sequence in enumerate(sequences if request.sampling is not None else ())
            ]
        except Exception as error:
            raise EngineError(_explain(request.request_id, error)) from error
        record = _Record(prepared, outputs)
        if request.sampling is None:
            self._by_sequence[request.request_id] = (record, None)
        for output in outputs:
            self._by_sequence[output.request.request_id] = (record, output)
        self._records[request.request_id] = record

    def discard(self, request_id: str) -> None:
        """Forget a request that was not accepted after all."""
        self._forget(self._records[request_id])

    def note_scheduled(self, new_requests: Iterable[NewRequest], now_s: float) -> None:
        """Requests that run for the first time get their `first_scheduled_time_s`."""
        for new in new_requests:
            found = self._by_sequence.get(new.request_id)
            if found is not None and found[0].first_scheduled_time_s is None:
                found[0].first_scheduled_time_s = now_s

    def process(self, updates: Iterable[SequenceUpdate], now_s: float) -> tuple[list[Output], list[Ending]]:
        """Apply one step's updates.

        Returns: the outputs of requests that got a token or ended, and the sequences that the scheduler must finish:
        they met a stop string, or their text could not be made.
        """
        endings: list[Ending] = []
        touched: dict[str, _Record] = {}
        outputs: list[Output] = []
        for update in updates:
            found = self._by_sequence.get(update.request.request_id)
            if found is None:
                continue
            record, sequence = found
            if sequence is None:
                if update.result.error is not None:
                    outputs.append(self._end_pooling(record, (), "error", update.result.error))
                elif update.result.embedding is not None:
                    outputs.append(self._end_pooling(record, update.result.embedding, "stop"))
                continue
            try:
                is_touched, ending = self._take(record, sequence, update, now_s)
            except Exception as error:
                sequence.fail(_explain(sequence.request.request_id, error), flush=False)
                is_touched, ending = True, Ending(sequence.request.request_id, RequestStatus.FINISHED_ERROR)
            if ending is not None:
                endings.append(ending)
            if is_touched:
                touched[record.request.request_id] = record
        for record in touched.values():
            if record.is_finished:
                outputs.append(self._end(record, now_s))
            elif record.streams:
                outputs.append(record.output(finished=False))
        return outputs, endings

    def _take(
        self, record: "_Record", sequence: SequenceOutput, update: SequenceUpdate, now_s: float
    ) -> tuple[bool, Ending | None]:
        """Apply one sequence's update. Returns True if its request has something new to show, and the end of the
        sequence if its text brings it."""
        result, request = update.result, update.request
        if result.prompt_logprobs:
            record.add_prompt_logprobs(update, self._token_texts)
        if sequence.finish_reason is not None:
            return False, None
        matched = None
        if update.new_token_ids:
            record.note_token(now_s)
            status = request.status if result.error is None else RequestStatus.RUNNING
            matched = sequence.add(result, update.new_token_ids, status)
        if matched is not None:
            return True, Ending(request.request_id, RequestStatus.FINISHED_STOPPED, matched)
        if result.error is not None and sequence.finish_reason is None:
            sequence.fail(result.error, result.error_code)
            return True, None
        return bool(update.new_token_ids), None

    def abort(self, request_id: str, now_s: float) -> Output:
        """Return the terminal output of a request that was aborted."""
        record = self._records[request_id]
        if not record.sequences:
            return self._end_pooling(record, (), "abort")
        for sequence in record.unfinished:
            try:
                sequence.finish("abort")
            except Exception as error:
                sequence.fail(_explain(sequence.request.request_id, error), flush=False)
        return self._end(record, now_s)

    def fail(self, request_id: str, error: str, now_s: float) -> Output:
        """Return the terminal output of a request that cannot go on."""
        record = self._records[request_id]
        if not record.sequences:
            return self._end_pooling(record, (), "error", error)
        for sequence in record.unfinished:
            try:
                sequence.fail(error)
            except Exception as text_error:
                _explain(sequence.request.request_id, text_error)
                sequence.fail(error, flush=False)
        return self._end(record, now_s)

    def _end(self, record: "_Record", now_s: float) -> RequestOutput:
        self._forget(record)
        output = record.output(finished=True)
        output.metrics = record.metrics(now_s)
        return output

    def _end_pooling(
        self, record: "_Record", embedding: Iterable[float], reason: str, error: str | None = None
    ) -> PoolingRequestOutput:
        self._forget(record)
        return PoolingRequestOutput(
            request_id=record.request.request_id,
            prompt_token_ids=record.request.prompt_token_ids,
            outputs=EmbeddingOutput(list(embedding)),
            num_cached_tokens=record.request.num_cached_tokens,
            finish_reason=reason,
            error=error,
        )

    def _forget(self, record: "_Record") -> None:
        del self._records[record.request.request_id]
        if not record.sequences:
            del self._by_sequence[record.request.request_id]
        for sequence in record.sequences:
            del self._by_sequence[sequence.request.request_id]


def _explain(request_id: str, error: Exception) -> str:
    """Log an error in making a text. Returns the message for the caller."""
    logger.error("request %r fails: its text cannot be made", request_id, exc_info=error)
    return f"the text of this request could not be made ({type(error).__name__}); the engine's log says more"


class _Record:
    """Record of a caller's request: its sequences, its prompt's log-probabilities and its times."""

    __slots__ = (
        "_first_token_time_s", "_grammar", "_last_token_time_s", "first_scheduled_time_s",
        "prompt", "prompt_logprobs", "request", "sequences", "streams",
    )  # fmt: skip

    def __init__(self, prepared: PreparedRequest, sequences: list[SequenceOutput]) -> None:
        request = prepared.request
        self.request: Request = request
        self.prompt = prepared.prompt
        self.streams = prepared.streams
        self._grammar = prepared.grammar  # held, so that it stays compiled
        self.sequences = sequences
        self.first_scheduled_time_s: float | None = None
        self._first_token_time_s: float | None = None
        self._last_token_time_s: float | None = None
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        if request.sampling is not None and request.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * request.num_prompt_tokens

    @property
    def unfinished(self) -> list[SequenceOutput]:
        """Sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def is_finished(self) -> bool:
        """True if all sequences have ended."""
        return None not in [sequence.finish_reason for sequence in self.sequences]

    def note_token(self, now_s: float) -> None:
        """A token came at `now_s`."""
        if self._first_token_time_s is None:
            self._first_token_time_s = now_s
        self._last_token_time_s = now_s

    def add_prompt_logprobs(self, update: SequenceUpdate, token_texts: TokenTexts) -> None:
        """Place the values of a chunk that ends at the last computed position that has a next prompt token.

        After a preemption the same positions come again, from a sibling too, which has the same prompt.
        """
        assert self.prompt_logprobs is not None
        stop = min(update.num_computed_tokens, self.request.num_prompt_tokens - 1) + 1
        start = stop - len(update.result.prompt_logprobs)
        for position, values in zip(range(start, stop), update.result.prompt_logprobs, strict=True):
            self.prompt_logprobs[position] = token_texts.describe(values)

    def output(self, *, finished: bool) -> RequestOutput:
        """Return all text and tokens so far."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[sequence.snapshot() for sequence in self.sequences],
            finished=finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.request.num_cached_tokens,
        )

    def metrics(self, now_s: float) -> RequestMetrics:
        """Return the request's times, at its end."""
        return RequestMetrics(
            arrival_time_s=self.request.arrival_time_s,
            first_scheduled_time_s=self.first_scheduled_time_s,
            first_token_time_s=self._first_token_time_s,
            last_token_time_s=self._last_token_time_s,
            finished_time_s=now_s,
            num_preemptions=sum(sequence.request.num_preemptions for sequence in self.sequences),
        )
