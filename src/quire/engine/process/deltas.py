"""Encoder from cumulative outputs to differences, which are small to send.

Next to read: `child.py`.
"""

from quire.engine.output_processor import Output
from quire.engine.process.messages import ChoiceUpdate, Failure, RequestUpdate
from quire.errors import EngineDeadError
from quire.outputs import CompletionOutput, PoolingRequestOutput


class DeltaEncoder:
    """Encoder that keeps, for each request in flight, how much of its outputs has been sent."""

    def __init__(self) -> None:
        self._sent: dict[str, list[_Sent]] = {}

    def encode(self, output: Output) -> RequestUpdate:
        """Return the difference from the request's previous output. Mutates: self."""
        if isinstance(output, PoolingRequestOutput):
            return _pooling_update(output)
        sent = self._sent.get(output.request_id)
        is_first = sent is None
        if sent is None:
            sent = self._sent[output.request_id] = [_Sent() for _ in output.outputs]
        choices = [
            choice
            for so_far, completion in zip(sent, output.outputs, strict=True)
            if (choice := so_far.advance(completion)) is not None
        ]
        if output.finished:
            del self._sent[output.request_id]
        return RequestUpdate(
            output.request_id,
            choices,
            finished=output.finished,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs if is_first else None,
            metrics=output.metrics,
        )


class _Sent:
    """Characters and tokens of one completion that have been sent."""

    __slots__ = ("is_finished", "num_chars", "num_tokens")

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_tokens = 0
        self.is_finished = False

    def advance(self, completion: CompletionOutput) -> ChoiceUpdate | None:
        if self.is_finished or (not completion.finished and len(completion.token_ids) == self.num_tokens):
            return None
        logprobs = completion.logprobs
        update = ChoiceUpdate(
            completion.index,
            completion.text[self.num_chars :],
            completion.token_ids[self.num_tokens :],
            None if logprobs is None else logprobs[self.num_tokens :],
            completion.finish_reason,
            completion.stop_reason,
            completion.error,
            completion.error_code,
        )
        self.num_chars = len(completion.text)
        self.num_tokens = len(completion.token_ids)
        self.is_finished = completion.finished
        return update


def _pooling_update(output: PoolingRequestOutput) -> RequestUpdate:
    failure = None
    if output.finish_reason == "error":
        failure = Failure("engine_error", output.error or "the prompt could not be computed")
    elif output.finish_reason == "abort":
        failure = Failure.of(EngineDeadError("the request was aborted"))
    return RequestUpdate(
        output.request_id,
        finished=True,
        num_cached_tokens=output.num_cached_tokens,
        embedding=output.outputs.embedding if failure is None else None,
        failure=failure,
    )
