"""`POST /tokenize` and `POST /detokenize`: a prompt's tokens and their text, without generating."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import ApiError, JsonResponse
from quire.server.front_end import FrontEnd
from quire.server.protocol.prompts import DetokenizeRequest, TokenizeRequest
from quire.server.protocol.tools import tool_dicts
from quire.server.routes.chat import adds_generation_prompt, message_dicts
from quire.server.routes.exchange import in_thread, read_body
from quire.server.routing import RouteTable
from quire.server.state import state_of
from quire.text.dialogue import DialogueOptions

router = RouteTable()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt or a conversation."""
    body = await read_body(request, TokenizeRequest)
    front_end = state_of(request).engines.front_end
    return JsonResponse(await in_thread(request, _tokenize, front_end, body))


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    body = await read_body(request, DetokenizeRequest)
    front_end = state_of(request).engines.front_end
    return JsonResponse({"prompt": await in_thread(request, _detokenize, front_end, body.tokens)})


def _tokenize(front_end: FrontEnd, body: TokenizeRequest) -> dict[str, Any]:
    if body.prompt == "":
        token_ids: list[int] = []
    elif body.prompt is not None:
        token_ids = front_end.prompt(body.prompt, add_special_tokens=body.add_special_tokens is not False).token_ids
    else:
        options = DialogueOptions(
            add_generation_prompt=adds_generation_prompt(body.add_generation_prompt, body.continue_final_message),
            continue_final_message=bool(body.continue_final_message),
            variables=body.chat_template_kwargs or {},
            add_special_tokens=bool(body.add_special_tokens),
        )
        tools = tool_dicts(body.tools) if body.tools else None
        token_ids = front_end.chat_prompt(message_dicts(body.messages or []), tools, options)[0].token_ids
    pieces = [front_end.tokenizer.id_to_token(token_id) or "" for token_id in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": front_end.config.scheduler.max_model_len,
        "tokens": token_ids,
        "token_strs": pieces if body.return_token_strs else None,
    }


def _detokenize(front_end: FrontEnd, token_ids: list[int]) -> str:
    vocab_size = front_end.config.model.vocab_size
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        message = f"token id {highest} is not in the vocabulary: ids are 0 … {vocab_size - 1}"
        raise ApiError(400, message, code="invalid_parameter", param=f"tokens.{token_ids.index(highest)}")
    return front_end.tokenizer.decode(token_ids, skip_special_tokens=False)
