"""`POST /v1/completions`: continuations of one prompt or of many.

With `echo` a choice begins with its prompt; the prompt's log-probabilities then come from `prompt_logprobs`.
Next to read: `../generation.py`, `../logprobs.py`.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.engine.process.messages import ChoiceUpdate, RequestUpdate
from quire.outputs import PositionLogprobs
from quire.server.caller import Caller, caller_of
from quire.server.front_end import FrontEnd, PromptTokens
from quire.server.generation import Finished, collect, new_id, timestamp, until_disconnect
from quire.server.logprobs import LogprobWriter, prompt_logprobs
from quire.server.protocol.answers import FINGERPRINT
from quire.server.protocol.completion import DEFAULT_MAX_TOKENS, CompletionRequest
from quire.server.protocol.forms import form_of, renaming, schema_field
from quire.server.routes.body import check_model, json_answer, read_body
from quire.server.state import ServerState, state_of
from quire.server.streaming import DONE, EventStream, TextEvent, event, stream_updates
from quire.server.usage import timings, usage
from quire.types import Request as EngineRequest

router = APIRouter()
SEVERAL = 64
"""Answers to more prompts are written in a thread."""


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A request whose prompts have been checked and tokenised. `scores_only`: nothing is generated."""

    body: CompletionRequest
    answer_id: str
    created: int
    requests: list[EngineRequest]
    prompts: list[PromptTokens]
    scores_only: bool

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.body.n or 1

    def usage(self, num_generated: int, num_cached: int) -> dict[str, Any]:
        """OpenAI's `usage` of all prompts."""
        num_prompt = sum(request.num_prompt_tokens for request in self.requests)
        return usage(num_prompt, num_generated, num_cached, sum(prompt.num_truncated for prompt in self.prompts))

    def timings(self, num_generated: int, last: RequestUpdate) -> dict[str, Any]:
        """llama.cpp's `timings`, as a field; of several prompts there are none."""
        if len(self.requests) > 1:
            return {}
        times = timings(self.requests[0].num_prompt_tokens, num_generated, last)
        return {} if times is None else {"timings": times}


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue prompts."""
    body = await read_body(request, CompletionRequest)
    state, caller = state_of(request), caller_of(request)
    check_model(state, body.model)
    state.admission.check_room(caller, len(body.prompts) * (body.n or 1))
    front_end = state.supervisor.front_end
    job = await front_end.run(_prepare, front_end, body, caller)
    if body.stream:
        return EventStream(stream_updates(state, job.requests, caller, _Chunks(state, job)))
    return await until_disconnect(request.receive, _answer(state, job, caller))


def _prepare(front_end: FrontEnd, body: CompletionRequest, caller: Caller) -> CompletionJob:
    chosen = body.sampling_values()
    scores_only = body.max_tokens == 0
    # The engine generates at least one token; it is not shown.
    chosen["max_tokens"] = 1 if scores_only else body.max_tokens or DEFAULT_MAX_TOKENS
    if body.logprobs is not None:
        chosen["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        chosen["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    names = schema_field(body.response_format)
    with renaming(names):
        chosen["structured_outputs"] = form_of(body.response_format, body.structured_outputs)
    params = front_end.sampling_params(chosen)
    max_len = front_end.max_prompt_len(body.truncate_prompt_tokens, chosen["max_tokens"])
    prompts = [
        front_end.prompt(
            prompt,
            add_special_tokens=body.add_special_tokens is not False,
            max_len=max_len,
            keeps_start=body.keeps_start,
        )
        for prompt in body.prompts
    ]
    with renaming(names):
        requests = [
            front_end.prepare(
                new_id("cmpl"),
                prompt,
                params,
                **caller.identity(body.priority, body.cache_salt),
            )
            for prompt in prompts
        ]
    answer_id = f"cmpl-{body.request_id}" if body.request_id else new_id("cmpl")
    return CompletionJob(body, answer_id, timestamp(), requests, prompts, scores_only)


class _ChoiceWriter:
    """Writes one choice, piece by piece: its prompt first where that is echoed, then what was generated."""

    def __init__(self, job: CompletionJob, front_end: FrontEnd, prompt_index: int, index: int) -> None:
        body = job.body
        self._job = job
        self._front_end = front_end
        self._request = job.requests[prompt_index]
        self._prompt = job.prompts[prompt_index]
        self._index = prompt_index * job.num_choices + index
        self._has_begun = False
        self._logprobs = None
        if body.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            self._logprobs = LogprobWriter(front_end.tokenizer, body.logprobs, as_ids=as_ids)

    def empty(self) -> dict[str, Any]:
        """A choice without anything."""
        return {"index": self._index, "text": "", "logprobs": None, "finish_reason": None}

    def write(self, update: ChoiceUpdate, of_prompt: list[PositionLogprobs | None] | None) -> dict[str, Any]:
        """What is new of the choice. `of_prompt`: the prompt's log-probabilities. Mutates: what has been written."""
        body, is_first = self._job.body, not self._has_begun
        self._has_begun = True
        text, token_ids, positions = update.text, update.token_ids, list[PositionLogprobs | None](update.logprobs or [])
        if self._job.scores_only:
            text, token_ids, positions = "", [], []
        shown_ids = token_ids
        if is_first and body.echo:
            text = self._prompt_text() + text
            prompt_ids = self._request.prompt_token_ids
            if self._logprobs is not None:
                positions = [*(of_prompt or [None] * len(prompt_ids)), *positions]
                shown_ids = [*prompt_ids, *token_ids]
        written = self.empty() | {"text": text}
        if self._logprobs is not None:
            written["logprobs"] = self._logprobs.legacy(shown_ids, positions)
        if update.finish_reason is not None:
            written["finish_reason"] = "length" if self._job.scores_only else update.finish_reason
            written["stop_reason"] = None if self._job.scores_only else update.stop_reason
        if body.return_token_ids:
            written["token_ids"] = token_ids
            if is_first:
                written["prompt_token_ids"] = self._request.prompt_token_ids
        return written

    def _prompt_text(self) -> str:
        if self._prompt.text is not None and not self._prompt.num_truncated:
            return self._prompt.text
        return self._front_end.tokenizer.decode(self._prompt.token_ids, skip_special_tokens=False)


# --- The whole answer -------------------------------------------------------------------------


async def _answer(state: ServerState, job: CompletionJob, caller: Caller) -> Response:
    results = await collect(state, job.requests, caller)
    has_logprobs = job.body.logprobs is not None or job.body.prompt_logprobs is not None
    is_large = has_logprobs or len(results) > SEVERAL
    return await json_answer(state.supervisor.front_end, lambda: _written(state, job, results), is_large=is_large)


def _written(state: ServerState, job: CompletionJob, results: list[Finished]) -> dict[str, Any]:
    choices = [
        choice
        for prompt_index, finished in enumerate(results)
        for choice in _choices(job, state.supervisor.front_end, prompt_index, finished)
    ]
    num_generated = 0 if job.scores_only else sum(finished.num_generated for finished in results)
    return {
        "id": job.answer_id,
        "object": "text_completion",
        "created": job.created,
        "model": state.model_name,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
        "usage": job.usage(num_generated, sum(finished.last.num_cached_tokens for finished in results)),
        **job.timings(num_generated, results[0].last),
    }


def _choices(job: CompletionJob, front_end: FrontEnd, prompt_index: int, finished: Finished) -> list[dict[str, Any]]:
    of_prompt = finished.prompt_logprobs
    choices = []
    for choice in finished.choices:
        written = _ChoiceWriter(job, front_end, prompt_index, choice.index).write(choice, of_prompt)
        if job.body.prompt_logprobs is not None and of_prompt is not None:
            written["prompt_logprobs"] = prompt_logprobs(of_prompt)
        choices.append(written)
    return choices


# --- Streams ----------------------------------------------------------------------------------


class _Chunks:
    """Makes the events of one answer and counts its tokens."""

    def __init__(self, state: ServerState, job: CompletionJob) -> None:
        body, options = job.body, job.body.stream_options
        self._job = job
        self._front_end = state.supervisor.front_end
        self._num_generated = 0
        self._num_cached = [0] * len(job.requests)
        self._of_prompts: list[list[PositionLogprobs | None] | None] = [None] * len(job.requests)
        self._last = RequestUpdate("")
        self._has_usage = options is not None and bool(options.include_usage)
        self._counts_always = self._has_usage and options is not None and bool(options.continuous_usage_stats)
        self._is_plain = (
            body.logprobs is None and not body.return_token_ids and not self._counts_always and not job.scores_only
        )
        self._head = {
            "id": job.answer_id,
            "object": "text_completion",
            "created": job.created,
            "model": state.model_name,
            "system_fingerprint": FINGERPRINT,
        }
        self._writers: dict[tuple[int, int], _ChoiceWriter] = {}
        self._texts: dict[tuple[int, int], TextEvent] = {}

    def opening(self) -> bytes:
        """Nothing: a choice's first event brings its text."""
        return b""

    def of(self, index: int, update: RequestUpdate) -> bytes:
        """The chunks of what is new. Mutates: the count of tokens."""
        self._last = update
        self._num_cached[index] = update.num_cached_tokens
        if update.prompt_logprobs is not None:
            self._of_prompts[index] = update.prompt_logprobs
        data = b""
        for choice in update.choices:
            if not self._job.scores_only:
                self._num_generated += len(choice.token_ids)
            key = (index, choice.index)
            plain = self._texts.get(key)
            if plain is not None and choice.finish_reason is None:
                data += plain.encode(choice.text) if choice.text else b""
            else:
                data += self._full(key, choice, update)
        return data

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end."""
        if not self._has_usage:
            return DONE
        timed = self._job.timings(self._num_generated, self._last)
        return event({**self._head, "choices": [], "usage": self._usage(), **timed}) + DONE

    def _full(self, key: tuple[int, int], choice: ChoiceUpdate, update: RequestUpdate) -> bytes:
        writer = self._writers.get(key)
        if writer is None:
            writer = self._writers[key] = _ChoiceWriter(self._job, self._front_end, *key)
            if self._is_plain:
                # From the second update on: the first may have to echo.
                self._texts[key] = TextEvent(lambda text: self._content(writer.empty() | {"text": text}, {}))
        is_last = update.finished and choice is update.choices[-1] and not self._has_usage
        extra = self._job.timings(self._num_generated, update) if is_last else {}
        return event(self._content(writer.write(choice, self._of_prompts[key[0]]), extra))

    def _content(self, choice: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        content = {**self._head, "choices": [choice], **extra}
        if self._has_usage:
            content["usage"] = self._usage() if self._counts_always else None
        return content

    def _usage(self) -> dict[str, Any]:
        return self._job.usage(self._num_generated, sum(self._num_cached))
