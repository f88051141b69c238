"""Encoder from cumulative outputs to differences, which are small to send.

Next to read: `child.py`.
"""

from quire.engine.output_processor import Output
from quire.engine.process.messages import ChoiceUpdate, RequestUpdate
from quire.errors import EngineDeadError
from quire.outputs import CompletionOutput, PoolingRequestOutput
from quire.parallel.frames import Failure


class DeltaEncoder:
    """Encoder that keeps, for each request in flight, what its previous output said."""

    def __init__(self) -> None:
        self._sent: dict[str, list[CompletionOutput]] = {}

    def encode(self, output: Output) -> RequestUpdate:
        """Return the difference from the request's previous output. Mutates: self."""
        if isinstance(output, PoolingRequestOutput):
            return _pooling_update(output)
        sent = self._sent.pop(output.request_id, None)
        if not output.finished:
            self._sent[output.request_id] = output.outputs
        choices = [
            _difference(before, completion)
            for before, completion in zip(sent or [_NOTHING] * len(output.outputs), output.outputs, strict=True)
            if not before.finished and (completion.finished or len(completion.token_ids) > len(before.token_ids))
        ]
        return RequestUpdate(
            output.request_id,
            choices,
            finished=output.finished,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs if sent is None else None,
            metrics=output.metrics,
        )


_NOTHING = CompletionOutput(0, "", [])


def _difference(before: CompletionOutput, now: CompletionOutput) -> ChoiceUpdate:
    num_tokens = len(before.token_ids)
    return ChoiceUpdate(
        now.index,
        now.text[len(before.text) :],
        now.token_ids[num_tokens:],
        None if now.logprobs is None else now.logprobs[num_tokens:],
        now.finish_reason,
        now.stop_reason,
        now.error,
        now.error_code,
    )


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
