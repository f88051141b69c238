"""`POST /v1/chat/completions`: from messages to tokens, and from engine updates to a message or its chunks.

`/v1/responses` uses `prepare_chat` too. Next to read: `job.py`, `../generation.py`, `responses.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.process.messages import RequestUpdate
from quire.errors import InvalidParameterError
from quire.outputs import CompletionOutput
from quire.server.logprobs import prompt_logprobs
from quire.server.protocol.chat import ChatRequest, Message
from quire.server.protocol.fields import renaming
from quire.server.request_record import Caller
from quire.server.routes.exchange import answer, check_grammars, engine_ids, prepare, read_body
from quire.server.routes.job import Chunks, Job
from quire.server.routing import RouteTable
from quire.server.state import ServerState
from quire.server.streaming import stream_answer
from quire.structured_outputs import StructuredOutputsParams
from quire.text.dialogue import DialogueOptions, PreparedPrompt
from quire.text.reply import ReplyReader

router = RouteTable()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Job):
    """A chat request, checked and tokenised.

    Fields:
        prepared: the prompt, and how answers are read.
        opening: the beginning of every answer, the message that `echo` repeats.
        begun: per request the text of its `answer_token_ids`, which its readers have read already.
    """

    prepared: PreparedPrompt
    opening: str
    begun: list[str]

    def reader(self, index: int = 0) -> ReplyReader | None:
        """Return a reader of one choice of request `index`; None if its text is all content."""
        reader = self.prepared.reply_reader()
        if reader is not None and self.begun[index]:
            reader.events(self.begun[index], ends=False)
        return reader


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatRequest)
    num_prompts = len(body.answer_token_ids or ("",))
    job = await prepare(request, body, prepare_chat, num_prompts=num_prompts, n=body.n or 1)
    if body.stream:
        return stream_answer(request, job.requests, _ChatChunks(job))
    return await answer(request, job.requests, lambda results: _written(job, results))


async def prepare_chat(state: ServerState, body: ChatRequest, caller: Caller) -> ChatJob:
    """Render, tokenise and check. Raises: RequestError, QueueFullError."""
    demanded = {"structured_outputs": "tools"} if body.demands_call else {}
    with renaming({"logprobs": "top_logprobs", **body.renamed(), **demanded}):
        job = await state.work.prepare(caller, _job, state, body, caller)
        await check_grammars(state, caller, job.requests)
    return job


def _job(state: ServerState, body: ChatRequest, caller: Caller) -> ChatJob:
    front_end = state.engines.front_end
    max_tokens = body.max_completion_tokens or body.max_tokens
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    offer, values = body.offer(), body.sampling_values()
    prepared, prompt = front_end.chat_prompt(
        message_dicts(body.messages),
        None if offer is None else offer.tools,
        dialogue_options(state, body, None if body.demands_call else values.pop("structured_outputs", None)),
        max_len=front_end.max_prompt_len(body.truncate_prompt_tokens, max_tokens),
        keeps_start=body.keeps_start,
    )
    if body.answer_token_ids and prepared.constraint is not None:
        raise InvalidParameterError("answer_token_ids", body.answer_token_ids, "unset where answers follow a form")
    beginnings = body.answer_token_ids or [[]]
    prompts = [replace(prompt, token_ids=prompt.token_ids + token_ids) for token_ids in beginnings]
    limits = {"max_tokens": max_tokens, "logprobs": num_top, "structured_outputs": prepared.constraint}
    values |= {name: value for name, value in limits.items() if value is not None}
    if prepared.keeps_special_tokens:
        values["skip_special_tokens"] = False
    params = front_end.sampling_params(values)
    identity = caller.identity(body.priority, body.cache_salt, body.deadline_s)
    names = engine_ids(caller, len(prompts))
    requests = [
        front_end.prepare(name, prompt, params, **identity) for name, prompt in zip(names, prompts, strict=True)
    ]
    return ChatJob(
        body=body,
        front_end=front_end,
        model=caller.adapter or state.model_name,
        # The answer's id ends like the engine's: a trace and an answer can be matched.
        answer_id=f"chatcmpl-{body.request_id or caller.engine_id.removeprefix('req-')}",
        requests=requests,
        prompts=prompts,
        num_top=num_top,
        prepared=prepared,
        opening=_opening(body),
        begun=[
            front_end.tokenizer.decode(token_ids, skip_special_tokens=not prepared.keeps_special_tokens)
            for token_ids in beginnings
        ],
    )


def dialogue_options(
    state: ServerState, body: ChatRequest, constraint: StructuredOutputsParams | None
) -> DialogueOptions:
    """Return a body's choices about its prompt and the reading of its answers."""
    offer = body.offer()
    budget = body.reasoning_budget
    return DialogueOptions(
        tool_choice="none" if offer is None else offer.choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        add_generation_prompt=adds_generation_prompt(body.add_generation_prompt, body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
        reasoning_effort=body.reasoning_effort,
        enables_reasoning=body.enables_reasoning,
        reasoning_budget=state.options.reasoning_budget if budget is None else budget,
        separates_reasoning=state.options.reasoning_format != "none",
        includes_reasoning=body.include_reasoning is not False,
        constraint=constraint,
        variables={**(body.chat_template_kwargs or {}), "documents": body.documents},
        add_special_tokens=bool(body.add_special_tokens),
    )


def message_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages as a dialogue takes them."""
    return [message.model_dump(exclude_none=True, exclude={"annotations"}) for message in messages]


def adds_generation_prompt(chosen: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether the prompt ends with the beginning of the assistant's turn."""
    return not continue_final_message if chosen is None else chosen


def _opening(body: ChatRequest) -> str:
    last = body.messages[-1]
    if not body.echo or last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)


def _written(job: ChatJob, results: list[RequestUpdate]) -> dict[str, Any]:
    writer = job.logprob_writer()
    choices = []
    for place, (begun, choice) in enumerate(
        (index, choice) for index, finished in enumerate(results) for choice in finished.choices
    ):
        message, finish_reason = {"content": choice.text}, choice.finish_reason
        if (reader := job.reader(begun)) is not None:
            message, finish_reason = reader.message(choice.text, choice.finish_reason)
        if job.opening:
            message["content"] = job.opening + (message["content"] or "")
        written: dict[str, Any] = {
            "index": place,
            "message": {"role": "assistant", "refusal": None, **message},
            "logprobs": None if writer is None else writer.chat(choice.logprobs or []),
            "finish_reason": finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if job.body.return_token_ids:
            written["token_ids"] = choice.token_ids
        choices.append(written)
    whole = job.answer("chat.completion", choices, results)
    if results[0].prompt_logprobs is not None:
        whole["prompt_logprobs"] = prompt_logprobs(results[0].prompt_logprobs)
    if job.body.return_token_ids:
        whole["prompt_token_ids"] = job.requests[0].prompt_token_ids
    return whole


class _ChatChunks(Chunks):
    """A role for each choice, then its text or calls, and a last chunk with the reason of its end."""

    kind = "chat.completion.chunk"

    def __init__(self, job: ChatJob) -> None:
        super().__init__(job)
        self._opening = job.opening
        self._n = job.body.n or 1
        self._readers = [job.reader(index) for index in range(len(job.requests)) for _ in range(self._n)]
        self._is_plain = self._is_plain and self._readers[0] is None
        self._writer = job.logprob_writer()

    def opening(self) -> bytes:
        """Return each choice's first chunk."""
        body, request = self._job.body, self._job.requests[0]
        extra = {"prompt_token_ids": request.prompt_token_ids} if body.return_token_ids else {}
        delta = {"role": "assistant", "content": self._opening}
        return b"".join(self.chunk(_choice(place, delta), extra) for place in range(len(self._readers)))

    def choices(self, index: int, choice: CompletionOutput, update: RequestUpdate) -> list[dict[str, Any]]:
        """Return the choices of the chunks for an update."""
        ends = choice.finish_reason is not None
        deltas: list[dict[str, Any]] = [{"content": choice.text}] if choice.text else []
        reason = choice.finish_reason
        place = index * self._n + choice.index
        if (reader := self._readers[place]) is not None:
            deltas = reader.deltas(choice.text, ends=ends)
            reason = reader.finish_reason(reason)
        if not deltas and choice.token_ids and self._has_extras:
            deltas = [{"content": ""}]
        written = [_choice(place, delta) for delta in deltas]
        # Log-probabilities and ids of the tokens go with the first of several chunks.
        if written and self._writer is not None:
            written[0]["logprobs"] = self._writer.chat(choice.logprobs or [])
        if written and self._job.body.return_token_ids:
            written[0]["token_ids"] = choice.token_ids
        if ends:
            end = {"finish_reason": reason, "stop_reason": choice.stop_reason}
            written.append(_choice(place, {}) | end)
        return written


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
