"""Turns what a step computed into what callers see: `RequestOutput` and `PoolingRequestOutput`.

Keeps one record per request of the caller, with its `n` sequences, until the request has had its one terminal
output. Knows no scheduler: it is told of updates, and says which sequences end because of their text.
A sequence whose text cannot be made fails alone. Next to read: `llm_engine.py`.
"""

import logging
from collections.abc import Iterable
from typing import NamedTuple

from quire.engine.input_processor import PreparedRequest
from quire.engine.sequence_output import SequenceOutput
from quire.engine.token_texts import TokenTexts
from quire.errors import DuplicateRequestError, EngineError
from quire.outputs import EmbeddingOutput, PoolingRequestOutput, PositionLogprobs, RequestMetrics, RequestOutput
from quire.text.tokenizer import Tokenizer
from quire.types import NewRequest, Request, RequestStatus, SequenceUpdate

logger = logging.getLogger("quire.engine")
Output = RequestOutput | PoolingRequestOutput


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
        """The caller's request that a sequence belongs to; a beam, which is unknown here, is its own."""
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
        """Take one step's updates.

        Returns: the outputs of requests that got a token or ended, and the sequences that met a stop string or whose
        text could not be made: the scheduler must finish those.
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
        """One sequence's update: whether its request has something new to show, and its end, if its text brings it."""
        if update.result.error is not None:
            sequence.fail(update.result.error, update.result.error_code)
            return True, None
        if update.result.prompt_logprobs:
            record.add_prompt_logprobs(update, self._token_texts)
        if update.new_token_id is None or sequence.finish_reason is not None:
            return False, None
        record.note_token(now_s)
        matched = sequence.add(update.result, update.new_token_id, update.status)
        if matched is None:
            return True, None
        return True, Ending(update.request.request_id, RequestStatus.FINISHED_STOPPED, matched)

    def abort(self, request_id: str, now_s: float) -> Output:
        """The terminal output of a request that was aborted."""
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
        """The terminal output of a request that cannot go on."""
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
    """What the caller is told of a text that cannot be made; the log gets the rest."""
    logger.error("request %r fails: its text cannot be made", request_id, exc_info=error)
    return f"the text of this request could not be made ({type(error).__name__}); the engine's log says more"


class _Record:
    """One request of the caller: its sequences, its prompt's log-probabilities and its times."""

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
        """Whether all sequences have ended."""
        return None not in [sequence.finish_reason for sequence in self.sequences]

    def note_token(self, now_s: float) -> None:
        """A token came at `now_s`."""
        if self._first_token_time_s is None:
            self._first_token_time_s = now_s
        self._last_token_time_s = now_s

    def add_prompt_logprobs(self, update: SequenceUpdate, token_texts: TokenTexts) -> None:
        """Place the values of a chunk that ends at the last computed position that has a next prompt token.

        After a preemption the same positions come again, from a sibling too, whose prompt is the same.
        """
        assert self.prompt_logprobs is not None
        stop = min(update.request.num_computed_tokens, self.request.num_prompt_tokens - 1) + 1
        start = stop - len(update.result.prompt_logprobs)
        for position, values in zip(range(start, stop), update.result.prompt_logprobs, strict=True):
            self.prompt_logprobs[position] = token_texts.describe(values)

    def output(self, *, finished: bool) -> RequestOutput:
        """All text and tokens so far."""
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
        """The request's times, at its end."""
        return RequestMetrics(
            arrival_time_s=self.request.arrival_time_s,
            first_scheduled_time_s=self.first_scheduled_time_s,
            first_token_time_s=self._first_token_time_s,
            last_token_time_s=self._last_token_time_s,
            finished_time_s=now_s,
            num_preemptions=sum(sequence.request.num_preemptions for sequence in self.sequences),
        )
