"""`POST /v1/completions`: continuations of one prompt or of many.

With `echo` a choice begins with its prompt; the prompt's log-probabilities then come from `prompt_logprobs`.
With `suffix` a choice fills in the text between prompt and suffix.
Next to read: `job.py`, `infill.py`, `../generation.py`, `../logprobs.py`.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.process.messages import RequestUpdate
from quire.outputs import CompletionOutput, PositionLogprobs
from quire.server.logprobs import prompt_logprobs
from quire.server.protocol.fields import prompt_list, renaming
from quire.server.protocol.prompts import DEFAULT_MAX_TOKENS, CompletionRequest
from quire.server.request_record import Caller
from quire.server.routes.exchange import answer, check_grammars, check_shared, engine_ids, prepare, read_body
from quire.server.routes.infill import fim_prompt, fim_tokens, with_endings
from quire.server.routes.job import Chunks, Job
from quire.server.routing import RouteTable
from quire.server.state import ServerState
from quire.server.streaming import stream_answer

router = RouteTable()
KIND = "text_completion"


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue prompts."""
    body = await read_body(request, CompletionRequest)
    job = await prepare(request, body, prepare_completion, num_prompts=len(prompt_list(body.prompt)), n=body.n or 1)
    if body.stream:
        return stream_answer(request, job.requests, _CompletionChunks(job))
    return await answer(request, job.requests, lambda results: _written(job, results))


async def prepare_completion(state: ServerState, body: CompletionRequest, caller: Caller) -> Job:
    """Tokenise and check. Raises: RequestError, QueueFullError."""
    with renaming(body.renamed()):
        job = await state.work.prepare(caller, _job, state, body, caller)
        await check_grammars(state, caller, job.requests)
    return job


def _job(state: ServerState, body: CompletionRequest, caller: Caller) -> Job:
    front_end = state.engines.front_end
    scores_only = body.max_tokens == 0
    chosen = body.sampling_values()
    # The engine generates at least one token; it is not shown.
    chosen["max_tokens"] = 1 if scores_only else body.max_tokens or DEFAULT_MAX_TOKENS
    if body.logprobs is not None:
        chosen["logprobs"] = body.logprobs
        if body.echo:
            chosen["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    given = prompt_list(body.prompt)
    check_shared("suffix", len(body.suffix or ""), len(given))
    fim = fim_tokens(front_end, "suffix") if body.suffix else None
    params = front_end.sampling_params(chosen if fim is None else with_endings(front_end, fim, chosen))
    max_len = front_end.max_prompt_len(body.truncate_prompt_tokens, chosen["max_tokens"])
    adds = body.add_special_tokens is not False
    prompts = [
        fim_prompt(front_end, fim, prompt, body.suffix, adds_bos=adds, max_len=max_len)
        if fim is not None and body.suffix and isinstance(prompt, str)
        else front_end.prompt(prompt, add_special_tokens=adds, max_len=max_len, keeps_start=body.keeps_start)
        for prompt in given
    ]
    identity = caller.identity(body.priority, body.cache_salt, body.deadline_s)
    names = engine_ids(caller, len(prompts))
    requests = [
        front_end.prepare(name, prompt, params, **identity) for name, prompt in zip(names, prompts, strict=True)
    ]
    return Job(
        body=body,
        front_end=front_end,
        model=caller.adapter or state.model_name,
        answer_id=f"cmpl-{body.request_id or caller.engine_id.removeprefix('req-')}",
        requests=requests,
        prompts=prompts,
        num_top=body.logprobs,
        scores_only=scores_only,
    )


class _ChoiceWriter:
    """Writes one choice, piece by piece: first its prompt, if it is echoed, then the generated text."""

    def __init__(self, job: Job, prompt_index: int, index: int) -> None:
        self._job = job
        self._request = job.requests[prompt_index]
        self._prompt = job.prompts[prompt_index]
        self._index = prompt_index * (job.body.n or 1) + index
        self._has_begun = False
        self._logprobs = job.logprob_writer()

    def write(self, update: CompletionOutput, of_prompt: list[PositionLogprobs | None] | None) -> dict[str, Any]:
        """Return the new parts of the choice. `of_prompt`: the prompt's log-probabilities. Mutates: the progress."""
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
        written: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}
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
        body = self._job.body
        has_suffix = isinstance(body, CompletionRequest) and bool(body.suffix)
        if self._prompt.text is not None and (has_suffix or not self._prompt.num_truncated):
            return self._prompt.text
        return self._job.front_end.tokenizer.decode(self._prompt.token_ids, skip_special_tokens=False)


def _written(job: Job, results: list[RequestUpdate]) -> dict[str, Any]:
    choices = []
    for prompt_index, finished in enumerate(results):
        of_prompt = finished.prompt_logprobs
        for choice in finished.choices:
            written = _ChoiceWriter(job, prompt_index, choice.index).write(choice, of_prompt)
            if job.body.prompt_logprobs is not None and of_prompt is not None:
                written["prompt_logprobs"] = prompt_logprobs(of_prompt)
            choices.append(written)
    return job.answer(KIND, choices, results)


class _CompletionChunks(Chunks):
    """Chunks of text; a choice's last one has the reason of its end."""

    kind = KIND

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._of_prompts: dict[int, list[PositionLogprobs | None]] = {}
        self._writers: dict[tuple[int, int], _ChoiceWriter] = {}

    def choices(self, index: int, choice: CompletionOutput, update: RequestUpdate) -> list[dict[str, Any]]:
        """Return the choice of the chunk for an update; none for part of a character."""
        if update.prompt_logprobs is not None and self._job.body.echo:
            self._of_prompts[index] = update.prompt_logprobs
        if not (choice.text or choice.finish_reason or self._has_extras):
            return []
        key = (index, choice.index)
        if key not in self._writers:
            self._writers[key] = _ChoiceWriter(self._job, *key)
        written = self._writers[key].write(choice, self._of_prompts.get(index))
        if index in self._of_prompts and sum(of == index for of, _ in self._writers) == (self._job.body.n or 1):
            del self._of_prompts[index]  # every choice has begun with them
        return [written]
