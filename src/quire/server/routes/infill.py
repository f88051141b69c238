"""`POST /infill`: llama.cpp's route for editors, which fills in the text between a prefix and a suffix.

Next to read: `../../text/infill.py`, `../protocol/prompts.py`, `completions.py`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.process.messages import RequestUpdate
from quire.server.errors import ApiError, JsonResponse
from quire.server.front_end import FrontEnd, PromptTokens
from quire.server.generation import generate, until_disconnect
from quire.server.protocol.fields import renaming
from quire.server.protocol.prompts import CompletionRequest, InfillRequest
from quire.server.request_record import Caller, record_of
from quire.server.routes.exchange import check_grammars, prepare, read_body
from quire.server.routes.job import Job
from quire.server.routing import RouteTable
from quire.server.state import ServerState, state_of
from quire.server.streaming import EventStream, event
from quire.text.infill import infill_prompt
from quire.text.tokenizer_parts import LOOKED_FOR, FimTokens

router = RouteTable()
USUAL_TOKENS = 256
"""Tokens of the context that a long prompt leaves free for an answer without `n_predict`."""


@router.post("/infill")
async def infill(request: Request) -> Response:
    """Fill in the text between a prefix and a suffix."""
    body = await read_body(request, InfillRequest)
    job = await prepare(request, body, prepare_infill, n=1)
    answer = _Answer(body, job)
    if body.stream:
        return EventStream(_events(request, answer), lambda error: event(error.body()))

    async def work() -> Response:
        async with aclosing(_computed(request, answer, streams=(body.t_max_predict_ms or 0) > 0)) as updates:
            async for _ in updates:
                pass
        return JsonResponse(answer.last(answer.text))

    return await until_disconnect(request.receive, work())


async def prepare_infill(state: ServerState, body: InfillRequest, caller: Caller) -> Job:
    """Tokenise and check. Raises: ApiError, RequestError, QueueFullError."""
    completion = body.completion()
    with renaming({"max_tokens": "n_predict", **completion.renamed()}):
        job = await state.work.prepare(caller, _job, state, body, completion, caller)
        await check_grammars(state, caller, job.requests)
    return job


def _job(state: ServerState, body: InfillRequest, completion: CompletionRequest, caller: Caller) -> Job:
    front_end = state.engines.front_end
    fim = fim_tokens(front_end, "input_suffix")
    max_model_len = front_end.config.scheduler.max_model_len
    num_free = USUAL_TOKENS if completion.max_tokens is None else max(1, completion.max_tokens)
    max_len = max_model_len - min(num_free, max_model_len // 2)
    chosen = completion.sampling_values()
    # The engine generates at least one token; it is not shown.
    chosen["max_tokens"] = 1 if completion.max_tokens == 0 else completion.max_tokens
    params = front_end.sampling_params(with_endings(front_end, fim, chosen))
    prompt = fim_prompt(
        front_end,
        fim,
        str(completion.prompt),
        body.input_suffix,
        files=[(file.filename or "", file.text) for file in body.input_extra or []],
        max_len=min(max_len, front_end.max_prompt_len(body.truncate_prompt_tokens, num_free) or max_len),
    )
    identity = caller.identity(body.priority, body.cache_salt, body.deadline_s)
    made = front_end.prepare(caller.engine_id, prompt, params, **identity)
    return Job(
        body=completion,
        front_end=front_end,
        model=caller.adapter or state.model_name,
        answer_id=f"infill-{caller.engine_id.removeprefix('req-')}",
        requests=[made],
        prompts=[prompt],
        scores_only=completion.max_tokens == 0,
    )


# --- Shared with /v1/completions --------------------------------------------------------------


def fim_tokens(front_end: FrontEnd, param: str) -> FimTokens:
    """Return the model's fill-in-the-middle tokens. Raises: ApiError 400 about the field `param` if it has none."""
    fim = front_end.tokenizer.fim
    if fim is None:
        message = (
            f"{param} is not supported by this model: its vocabulary has no fill-in-the-middle tokens (looked for "
            f"{LOOKED_FOR} and their counterparts); send the text before the gap to /v1/completions, or serve a model "
            "for code"
        )
        raise ApiError(400, message, code="unsupported_parameter", param=param)
    return fim


def fim_prompt(
    front_end: FrontEnd,
    fim: FimTokens,
    prefix: str,
    suffix: str,
    *,
    files: Sequence[tuple[str, str]] = (),
    adds_bos: bool = True,
    max_len: int | None = None,
) -> PromptTokens:
    """Return the tokens of a prompt; its text is the prefix. `max_len` None: no limit.

    Raises: PromptError, ContextLengthError for texts with too many characters to fit.
    """
    num_characters = len(prefix) + len(suffix) + sum(len(name) + len(text) for name, text in files)
    if max_len is None:
        front_end.input_processor.check_text_length(prefix + suffix)
    made = front_end.encoded(
        num_characters,
        lambda: infill_prompt(
            front_end.tokenizer, fim, prefix, suffix, files=files, adds_bos=adds_bos, max_len=max_len
        ),
    )
    return PromptTokens(prefix, made.token_ids, made.num_truncated)


def with_endings(front_end: FrontEnd, fim: FimTokens, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return sampling values with which the model's markers end the text, too, unless EOS does not."""
    if chosen.get("ignore_eos"):
        return chosen
    endings = {token_id for token_id in fim.endings if token_id < front_end.config.model.vocab_size}
    return {**chosen, "stop_token_ids": sorted(endings.union(chosen.get("stop_token_ids") or ()))}


# --- Answers ----------------------------------------------------------------------------------


class _Answer:
    """An answer in the making. `text`: what was generated so far."""

    def __init__(self, body: InfillRequest, job: Job) -> None:
        self.job = job
        self.text = ""
        self._body = body
        self._num_generated = 0
        self._first_s: float | None = None
        self._last = RequestUpdate("")

    def add(self, update: RequestUpdate) -> str:
        """Return the new text of an update. Mutates: the progress."""
        self._last = update
        if self.job.scores_only:
            return ""
        new = "".join(choice.text for choice in update.choices)
        self.text += new
        self._num_generated += sum(len(choice.token_ids) for choice in update.choices)
        if self._first_s is None:
            self._first_s = monotonic()
        return new

    @property
    def is_late(self) -> bool:
        """Return whether the time is over, and a whole line generated."""
        limit_ms, first_s = self._body.t_max_predict_ms or 0, self._first_s
        if limit_ms <= 0 or first_s is None or "\n" not in self.text:
            return False
        return (monotonic() - first_s) * 1e3 > limit_ms

    def part(self, content: str) -> dict[str, Any]:
        """Return the fields of an event with `content`."""
        return {
            "index": 0,
            "content": content,
            "stop": False,
            "tokens_predicted": self._num_generated,
            "tokens_evaluated": self.job.requests[0].num_prompt_tokens,
        }

    def last(self, content: str) -> dict[str, Any]:
        """Return the whole answer, or the last event of a stream: the fields that the client wants."""
        end = self._last.choices[-1] if self._last.choices else None
        is_stop = end is not None and end.finish_reason == "stop" and not self.job.scores_only
        word = end.stop_reason if end is not None and is_stop and isinstance(end.stop_reason, str) else ""
        answer = {
            **self.part(content),
            "stop": True,
            "model": self.job.model,
            "tokens_cached": self._last.num_cached_tokens,
            "truncated": self.job.prompts[0].num_truncated > 0,
            "stop_type": "word" if word else "eos" if is_stop else "limit",
            "stopping_word": word,
            **self.job.timings(self._num_generated, self._last),
        }
        return answer if not self._body.response_fields else _chosen(answer, self._body.response_fields)


def _chosen(answer: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """Return the fields at `paths` under these names; others do not exist, and are left out."""
    found = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


async def _computed(request: Request, answer: _Answer, *, streams: bool) -> AsyncGenerator[str, None]:
    """Compute the answer; yield its new texts. It ends early when it is late."""
    updates = generate(state_of(request), answer.job.requests, record_of(request), streams=streams)
    async with aclosing(updates) as received:
        async for batch in received:
            yield "".join(answer.add(update) for _, update in batch)
            if answer.is_late:
                return


async def _events(request: Request, answer: _Answer) -> AsyncGenerator[bytes, None]:
    async with aclosing(_computed(request, answer, streams=True)) as texts:
        async for text in texts:
            if text:
                yield event(answer.part(text))
    yield event(answer.last(""))
