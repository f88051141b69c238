"""The last step of preparing a conversation, the same for `/v1/chat/completions` and `/v1/responses`.

Next to read: `chat_job.py`, `response_job.py`.
"""

from collections.abc import Mapping
from typing import Any

from quire.server.caller import Caller
from quire.server.front_end import FrontEnd, PromptTokens
from quire.server.generation import new_id
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.forms import form_of, renaming
from quire.server.protocol.responses import ResponsesRequest
from quire.server.tools import ToolUse, fields_of, plan_tools
from quire.types import Request

Body = ChatRequest | ResponsesRequest


def tool_use_of(front_end: FrontEnd, body: Body) -> ToolUse | None:
    """How the tools of a body are called; None without any. Raises: InvalidParameterError."""
    is_parallel = body.parallel_tool_calls is not False
    return plan_tools(front_end.template, front_end.tokenizer, body.offer(), is_parallel=is_parallel)


def prepare_request(
    front_end: FrontEnd,
    body: Body,
    caller: Caller,
    prompt: PromptTokens,
    chosen: Mapping[str, Any],
    tool_use: ToolUse | None,
    *,
    kind: str,
    names: Mapping[str, str],
) -> Request:
    """A request with its form and its tools, checked. Raises: RequestError.

    `kind` begins its id; `names` are those of `renaming`, beside what both routes have.
    """
    with renaming({"logprobs": "top_logprobs", **names, **fields_of(tool_use)}):
        form = form_of(body.response_format, body.structured_outputs)
        calls = {} if tool_use is None else tool_use.sampling_values()
        params = front_end.sampling_params({**chosen, "structured_outputs": form, **calls})
        return front_end.prepare(new_id(kind), prompt, params, **caller.identity(body.priority, body.cache_salt))
