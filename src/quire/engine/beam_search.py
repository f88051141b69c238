"""Beam search: the likeliest texts rather than a sampled one. Beams share the KV blocks of what they have in common.

A beam is a request with its next token chosen here (`awaits_external_token`). Each step reports every live beam's
likeliest tokens; the best `beam_width` continuations over all beams go on: the first continuation of a beam in
place, further ones as forks, which share its blocks and copy the last one on their first write.
Drives the scheduler's `fork` and `append_token`; knows no tensors. Next to read: `scheduler/scheduler.py`.
"""

import itertools
from dataclasses import dataclass
from operator import attrgetter

from quire.engine.adapters import LoRARequest
from quire.engine.llm_engine import LLMEngine
from quire.errors import InvalidParameterError
from quire.outputs import BeamSearchOutput, BeamSearchSequence
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.scheduler.request import Request, SequenceUpdate
from quire.text.detokenizer import IncrementalDetokenizer
from quire.types import RequestSpec, RequestStatus, TokenLogprobs

_SCORE = attrgetter("score")


@dataclass(slots=True, eq=False)
class _Beam:
    request: Request
    cumulative_logprob: float = 0.0
    report: TokenLogprobs | None = None
    """Likeliest next tokens; None until the beam's last token is computed."""
    has_failed: bool = False
    """Its logits leave no choice, and the scheduler has ended it."""


@dataclass(frozen=True, slots=True)
class _Continuation:
    beam: _Beam
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """The beams of one prompt. `start`, then `advance` after each engine step until `output` is there."""

    def __init__(
        self,
        engine: LLMEngine,
        request_id: str,
        prompt: object,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Check prompt, width and adapter. Raises: RequestError, ModelError."""
        max_num_seqs = engine.config.scheduler.max_num_seqs
        if params.beam_width > max_num_seqs:
            raise InvalidParameterError("beam_width", params.beam_width, f"at most max_num_seqs ({max_num_seqs})")
        processor = engine.input_processor
        self._prompt, self._prompt_token_ids, salt = processor.tokenize(prompt)
        self._adapter, self._hash_extras = processor.adapters.choose(lora_request, self._prompt_token_ids, (salt,))
        self._max_tokens = min(params.max_tokens, processor.room_for_generation(len(self._prompt_token_ids)))
        eos_token_ids = frozenset() if params.ignore_eos else processor.eos_token_ids
        processor.check_in_vocabulary("stop_token_ids", params.stop_token_ids)
        self._ending = eos_token_ids.union(params.stop_token_ids)
        self._num_candidates = min(2 * params.beam_width, engine.config.model.vocab_size)
        self._sampling = SamplingParams(temperature=0, logprobs=self._num_candidates, max_tokens=None)
        self._engine = engine
        self._params = params
        self._request_id = request_id
        self._num_made = itertools.count()
        self._live: list[_Beam] = []
        self._completed: list[BeamSearchSequence] = []
        """Their texts are made at the end."""
        self.output: BeamSearchOutput | None = None

    def start(self) -> None:
        """Queue the first beam: the prompt. Raises: CapacityError."""
        first = _Beam(self._make_request())
        self._engine.scheduler.add_request(first.request)
        self._add_live(first)

    def advance(self) -> bool:
        """Once every live beam has reported, choose the continuations. Returns True if the search ends by it."""
        if any(beam.has_failed for beam in self._live):
            # Without the continuations of one beam the rest cannot be ranked, so all live beams end as they are.
            for beam in self._live:
                self._complete(beam.request.output_token_ids, beam.cumulative_logprob, "error")
            self._finish()
        elif self._live and not any(beam.report is None for beam in self._live):
            chosen = self._choose()
            if chosen and not self._is_decided(chosen):
                self._continue(chosen)
                return False
            for item in chosen:
                self._complete([*item.beam.request.output_token_ids, item.token_id], item.cumulative_logprob, "length")
            self._finish()
        else:
            return False
        return True

    def cancel(self) -> None:
        """Free all beams."""
        self._engine.scheduler.abort([beam.request.request_id for beam in self._live])
        self._live = []

    def _make_request(self) -> Request:
        spec = RequestSpec(
            request_id=f"{self._request_id}/beam-{next(self._num_made)}",
            prompt_token_ids=self._prompt_token_ids,
            sampling=self._sampling,
            max_tokens=self._max_tokens,
            hash_extras=self._hash_extras,
            adapter=self._adapter,
        )
        return Request(spec, awaits_external_token=True)

    def _complete(self, token_ids: list[int], cumulative_logprob: float, finish_reason: str) -> None:
        score = self._penalised(cumulative_logprob, len(token_ids))
        self._completed.append(BeamSearchSequence(list(token_ids), "", cumulative_logprob, score, finish_reason))

    def _add_live(self, beam: _Beam) -> None:
        def report(update: SequenceUpdate) -> None:
            beam.has_failed |= update.result.error is not None
            # A preempted beam computes its last token again on return; the first report stands.
            if beam.report is None and update.result.logprobs:
                beam.report = update.result.logprobs[0]

        self._live.append(beam)
        beam.request.observer = report

    def _choose(self) -> list[_Continuation]:
        """Return the best `beam_width` continuations that go on; those that end are moved to the completed set."""
        candidates: list[_Continuation] = []
        for beam in self._live:
            assert beam.report is not None
            ranked = sorted(zip(beam.report.token_ids, beam.report.logprobs, strict=True), key=lambda item: -item[1])
            for token_id, logprob in ranked[: self._num_candidates]:
                candidates.append(_Continuation(beam, token_id, beam.cumulative_logprob + logprob))
        candidates.sort(key=lambda item: -item.cumulative_logprob)
        going_on: list[_Continuation] = []
        for item in candidates:
            if item.token_id in self._ending:
                self._complete([*item.beam.request.output_token_ids, item.token_id], item.cumulative_logprob, "stop")
            elif len(going_on) < self._params.beam_width:
                going_on.append(item)
        self._completed.sort(key=_SCORE, reverse=True)
        del self._completed[self._params.beam_width :]
        return going_on

    def _is_decided(self, chosen: list[_Continuation]) -> bool:
        """Return True if the end is reached, or no live beam can still beat the completed ones."""
        num_tokens = len(chosen[0].beam.request.output_token_ids) + 1
        if num_tokens >= self._max_tokens:
            return True
        if len(self._completed) < self._params.beam_width:
            return False
        # Log-probabilities only fall, so a beam ends best if it gains nothing more and has the best length.
        best_len = self._max_tokens if self._params.length_penalty > 0 else num_tokens
        bound = self._penalised(chosen[0].cumulative_logprob, best_len)
        return self._completed[-1].score >= bound

    def _continue(self, chosen: list[_Continuation]) -> None:
        scheduler = self._engine.scheduler
        previous, self._live = self._live, []
        for beam in previous:
            if not any(item.beam is beam for item in chosen):
                self._drop(beam)
        for beam in previous:
            continuations = [item for item in chosen if item.beam is beam]
            for item in continuations[1:]:
                child = _Beam(self._make_request(), item.cumulative_logprob)
                scheduler.fork(beam.request.request_id, child.request)
                scheduler.append_token(child.request.request_id, item.token_id)
                self._add_live(child)
            for item in continuations[:1]:
                beam.report = None
                beam.cumulative_logprob = item.cumulative_logprob
                scheduler.append_token(beam.request.request_id, item.token_id)
                self._live.append(beam)

    def _drop(self, beam: _Beam) -> None:
        self._engine.scheduler.finish(beam.request.request_id, RequestStatus.FINISHED_STOPPED)

    def _finish(self) -> None:
        for beam in self._live:
            self._drop(beam)
        self._live = []
        best = sorted(self._completed, key=_SCORE, reverse=True)[: self._params.beam_width]
        for item in best:
            # As in sampling: the token that ends a text is listed, and shown only when asked for.
            hidden = item.finish_reason == "stop" and not self._params.include_stop_str_in_output
            item.text = self._decode(item.token_ids[:-1] if hidden else item.token_ids)
        self.output = BeamSearchOutput(self._prompt, self._prompt_token_ids, best)

    def _penalised(self, cumulative_logprob: float, num_tokens: int) -> float:
        length: float = max(1, num_tokens) ** self._params.length_penalty
        return cumulative_logprob / length

    def _decode(self, token_ids: list[int]) -> str:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return ""
        detokenizer = IncrementalDetokenizer(tokenizer, self._prompt_token_ids, skip_special_tokens=True)
        return "".join([detokenizer.append(token_id) for token_id in token_ids]) + detokenizer.finish()
