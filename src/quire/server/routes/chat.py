"""`POST /v1/chat/completions`: from messages to tokens, and from engine updates to a message or its chunks.

`/v1/responses` uses `prepare_chat` too. Next to read: `job.py`, `../generation.py`, `responses.py`.
"""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from quire.engine.process.messages import RequestUpdate
from quire.outputs import CompletionOutput
from quire.server.front_end import PromptTokens
from quire.server.generation import new_id
from quire.server.logprobs import prompt_logprobs
from quire.server.protocol.chat import ChatRequest, Message
from quire.server.protocol.fields import renaming
from quire.server.reply import ReplyReader
from quire.server.request_record import Caller
from quire.server.routes.exchange import answer, prepare, read_body
from quire.server.routes.job import Chunks, Job
from quire.server.state import ServerState
from quire.server.streaming import stream_answer
from quire.server.tools import ToolUse, fields_of, plan_tools
from quire.text.reasoning import ReasoningFormat, find_reasoning

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Job):
    """A chat request, checked and tokenised.

    Fields:
        tool_use, reasoning: calls and reasoning that answers may have.
        opening: the beginning of every answer, the message that `echo` repeats.
    """

    tool_use: ToolUse | None
    reasoning: ReasoningFormat | None
    opening: str
    keeps_reasoning: bool = True

    def reader(self) -> ReplyReader | None:
        """Return a reader of one choice; None if its text is all content."""
        if self.tool_use is None and self.reasoning is None:
            return None
        return ReplyReader(self.reasoning, self.tool_use, keeps_reasoning=self.keeps_reasoning)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatRequest)
    job = await prepare(request, body, prepare_chat, n=body.n or 1)
    if body.stream:
        return stream_answer(request, job.requests, _ChatChunks(job))
    return await answer(request, job.requests, lambda results: _written(job, results))


def prepare_chat(state: ServerState, body: ChatRequest, caller: Caller) -> ChatJob:
    """Render, tokenise and check. Raises: RequestError."""
    front_end = state.supervisor.front_end
    max_tokens = body.max_completion_tokens or body.max_tokens
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    offer, is_parallel = body.offer(), body.parallel_tool_calls is not False
    tool_use = plan_tools(front_end.template, front_end.tokenizer, offer, is_parallel=is_parallel)
    prompt = front_end.chat_prompt(
        message_dicts(body.messages),
        tools=None if offer is None else offer.tools,
        add_generation_prompt=adds_generation_prompt(body.add_generation_prompt, body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
        variables={**reasoning_variables(body), **(body.chat_template_kwargs or {}), "documents": body.documents},
        add_special_tokens=bool(body.add_special_tokens),
        max_len=front_end.max_prompt_len(body.truncate_prompt_tokens, max_tokens),
        keeps_start=body.keeps_start,
    )
    with renaming({"logprobs": "top_logprobs", **body.renamed(), **fields_of(tool_use)}):
        limits = {
            name: value for name, value in (("max_tokens", max_tokens), ("logprobs", num_top)) if value is not None
        }
        calls = {} if tool_use is None else tool_use.sampling_values()
        values = {**body.sampling_values(), **limits, **calls}
        reasoning = _reasoning(state, body, prompt, is_bound=values.get("structured_outputs") is not None)
        if reasoning is not None and reasoning.has_special_marker:
            values["skip_special_tokens"] = False
        params = front_end.sampling_params(values)
        identity = caller.identity(body.priority, body.cache_salt)
        # The answer's id ends like the engine's: a trace and an answer can be matched.
        request_id = new_id("chat")
        request = front_end.prepare(request_id, prompt, params, **identity)
    return ChatJob(
        body=body,
        front_end=front_end,
        model=state.model_name,
        answer_id=f"chatcmpl-{body.request_id}" if body.request_id else f"chatcmpl-{request_id[5:]}",
        requests=[request],
        prompts=[prompt],
        num_top=num_top,
        tool_use=tool_use,
        reasoning=reasoning,
        opening=_opening(body),
        keeps_reasoning=body.include_reasoning is not False,
    )


def reasoning_variables(body: ChatRequest) -> dict[str, Any]:
    """Return `reasoning_effort` under the names that templates read."""
    effort = body.reasoning_effort
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _reasoning(
    state: ServerState, body: ChatRequest, prompt: PromptTokens, *, is_bound: bool
) -> ReasoningFormat | None:
    """Return how answers may reason; None if a grammar binds them, which allows no markers."""
    if state.options.reasoning_format == "none" or is_bound or body.continue_final_message:
        return None
    front_end = state.supervisor.front_end
    return find_reasoning(front_end.template, prompt.text or "", front_end.tokenizer)


def message_dicts(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages as a chat template reads them."""
    found = [message.model_dump(exclude_none=True, exclude={"annotations"}) for message in messages]
    for message in found:
        # Templates read it; a message may leave it out.
        message.setdefault("content", "")
    return found


def adds_generation_prompt(chosen: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether the prompt ends with the beginning of the assistant's turn."""
    return not continue_final_message if chosen is None else chosen


def _opening(body: ChatRequest) -> str:
    last = body.messages[-1]
    if not body.echo or last.role != "assistant" or last.content is None:
        return ""
    return last.content if isinstance(last.content, str) else "\n".join(part.text for part in last.content)


def _written(job: ChatJob, results: list[RequestUpdate]) -> dict[str, Any]:
    (finished,) = results
    writer = job.logprob_writer()
    choices = []
    for choice in finished.choices:
        message, finish_reason = {"content": choice.text}, choice.finish_reason
        if (reader := job.reader()) is not None:
            message, finish_reason = reader.message(choice.text, choice.finish_reason)
        if job.opening:
            message["content"] = job.opening + (message["content"] or "")
        written: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "refusal": None, **message},
            "logprobs": None if writer is None else writer.chat(choice.logprobs or []),
            "finish_reason": finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if job.body.return_token_ids:
            written["token_ids"] = choice.token_ids
        choices.append(written)
    whole = job.answer("chat.completion", choices, results)
    if finished.prompt_logprobs is not None:
        whole["prompt_logprobs"] = prompt_logprobs(finished.prompt_logprobs)
    if job.body.return_token_ids:
        whole["prompt_token_ids"] = job.requests[0].prompt_token_ids
    return whole


class _ChatChunks(Chunks):
    """A role for each choice, then its text or calls, and a last chunk with the reason of its end."""

    kind = "chat.completion.chunk"

    def __init__(self, job: ChatJob) -> None:
        super().__init__(job)
        self._opening = job.opening
        self._readers = [job.reader() for _ in range(job.body.n or 1)]
        self._is_plain = self._is_plain and self._readers[0] is None
        self._writer = job.logprob_writer()

    def opening(self) -> bytes:
        """Return each choice's first chunk."""
        body, request = self._job.body, self._job.requests[0]
        extra = {"prompt_token_ids": request.prompt_token_ids} if body.return_token_ids else {}
        delta = {"role": "assistant", "content": self._opening}
        return b"".join(self.chunk(_choice(index, delta), extra) for index in range(body.n or 1))

    def choices(self, index: int, choice: CompletionOutput, update: RequestUpdate) -> list[dict[str, Any]]:
        """Return the choices of the chunks for an update."""
        ends = choice.finish_reason is not None
        deltas: list[dict[str, Any]] = [{"content": choice.text}] if choice.text else []
        reason = choice.finish_reason
        if (reader := self._readers[choice.index]) is not None:
            deltas = reader.deltas(choice.text, ends=ends)
            reason = reader.finish_reason(reason)
        if not deltas and choice.token_ids and self._has_extras:
            deltas = [{"content": ""}]
        written = [_choice(choice.index, delta) for delta in deltas]
        # Log-probabilities and ids of the tokens go with the first of several chunks.
        if written and self._writer is not None:
            written[0]["logprobs"] = self._writer.chat(choice.logprobs or [])
        if written and self._job.body.return_token_ids:
            written[0]["token_ids"] = choice.token_ids
        if ends:
            end = {"finish_reason": reason, "stop_reason": choice.stop_reason}
            written.append(_choice(choice.index, {}) | end)
        return written


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
