"""One sequence's way from token ids to text: detokenised piece by piece and searched for stop strings.

A sequence is one of the `n` completions of a request. Knows no scheduler and no other sequence.
Next to read: `output_processor.py`, which owns these.
"""

from quire.engine.token_texts import TokenTexts
from quire.outputs import CompletionOutput, PositionLogprobs
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.stop_strings import StopStringMatcher
from quire.text.tokenizer import Tokenizer
from quire.types import Request, RequestResult, RequestStatus


class SequenceOutput:
    """Text, log-probabilities and end of one sequence, so far.

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

    def add(self, result: RequestResult, token_id: int, status: RequestStatus) -> str | None:
        """Take one token. Returns the stop string it completed, if any.

        `status`: the request's after this token; where the scheduler has ended it (EOS, stop token, length), that end
        is taken over.
        """
        self.num_tokens += 1
        self._add_logprobs(result)
        # The token that ends a text is listed but not shown, unless stop strings are shown as well.
        hidden = status is RequestStatus.FINISHED_STOPPED and not self._params.include_stop_str_in_output
        matched = None if hidden or self._detokenizer is None else self._show(self._detokenizer.append(token_id))
        if status.is_finished:
            self.finish(status.finish_reason or "error", self.request.stop_reason, flush=matched is None)
            return None
        if matched is not None:
            self.finish("stop", matched, flush=False)
        return matched

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
        """The completion so far. Its lists are copies: later steps do not change an output already given away.

        A copy of 1,000 token ids takes about 2 µs, and outputs that nobody reads are not made at all.
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

    def _add_logprobs(self, result: RequestResult) -> None:
        if self.logprobs is None or self.cumulative_logprob is None or result.logprobs is None:
            return
        self.logprobs.append(self._token_texts.describe(result.logprobs))
        self.cumulative_logprob += result.logprobs.logprobs[0]
