"""Turns what a step computed into what callers see: `RequestOutput` and `PoolingRequestOutput`.

Keeps one record per request of the caller, with its `n` sequences, until the request has had its one terminal
output. Knows no scheduler: it is told of updates, and says which sequences met a stop string.
Next to read: `llm_engine.py`.
"""

from collections.abc import Iterable

from quire.engine.input_processor import PreparedRequest
from quire.engine.sequence_output import SequenceOutput
from quire.engine.token_texts import TokenTexts
from quire.errors import DuplicateRequestError
from quire.text.tokenizer import Tokenizer
from quire.types import (
    EmbeddingOutput,
    NewRequest,
    PoolingRequestOutput,
    PositionLogprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    SequenceUpdate,
)

Output = RequestOutput | PoolingRequestOutput


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
        """Start a record. Raises: DuplicateRequestError if the id, or that of a sibling, is in use."""
        request = prepared.request
        sequences = [request, *request.siblings]
        for sequence in sequences:
            if sequence.request_id in self._by_sequence:
                raise DuplicateRequestError(
                    f"request id '{sequence.request_id}' is in use by a running request: choose another, or wait"
                )
        record = _Record(prepared, [])
        if request.sampling is None:
            self._by_sequence[request.request_id] = (record, None)
        for index, sequence in enumerate(sequences if request.sampling is not None else ()):
            output = SequenceOutput(sequence, index, self._tokenizer, self._token_texts)
            record.sequences.append(output)
            self._by_sequence[sequence.request_id] = (record, output)
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

    def process(self, updates: Iterable[SequenceUpdate], now_s: float) -> tuple[list[Output], list[tuple[str, str]]]:
        """Take one step's updates.

        Returns: the outputs of requests that got a token or ended, and (sequence id, stop string) of each
        sequence that met a stop string: the scheduler must finish those.
        """
        stopped: list[tuple[str, str]] = []
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
            if update.result.error is not None:
                sequence.fail(update.result.error)
                touched[record.request.request_id] = record
                continue
            if update.result.prompt_logprobs:
                record.add_prompt_logprobs(update, self._token_texts)
            if update.new_token_id is None or sequence.finish_reason is not None:
                continue
            record.note_token(now_s)
            matched = sequence.add(update.result, update.new_token_id)
            if matched is not None:
                stopped.append((update.request.request_id, matched))
            touched[record.request.request_id] = record
        for record in touched.values():
            if record.is_finished:
                outputs.append(self._end(record, now_s))
            elif record.streams:
                outputs.append(record.output(finished=False))
        return outputs, stopped

    def abort(self, request_id: str, now_s: float) -> Output:
        """The terminal output of a request that was aborted."""
        record = self._records[request_id]
        if not record.sequences:
            return self._end_pooling(record, (), "abort")
        for sequence in record.unfinished:
            sequence.finish("abort")
        return self._end(record, now_s)

    def fail(self, request_id: str, error: str, now_s: float) -> Output:
        """The terminal output of a request that cannot go on."""
        record = self._records[request_id]
        if not record.sequences:
            return self._end_pooling(record, (), "error", error)
        for sequence in record.unfinished:
            sequence.fail(error)
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

        A preempted request reports positions again; a sibling that was preempted reports its leader's.
        """
        if self.prompt_logprobs is None or update.request is not self.request:
            return
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
