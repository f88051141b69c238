"""`POST /v1/score`, `/v1/rerank` and `/classify`, with the other paths that vLLM, Jina and Cohere give them.

Next to read: `engine/scoring.py` for the scores, `exchange.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engine.process.messages import RequestUpdate
from quire.engine.scoring import Scoring, make_pairs, probabilities
from quire.sampling_params import PoolingParams
from quire.server.generation import new_id, timestamp
from quire.server.protocol.fields import prompt_list
from quire.server.protocol.scores import ClassifyRequest, PairFields, RerankRequest, ScoreRequest
from quire.server.request_record import Caller
from quire.server.routes.exchange import (
    answer,
    check_shared,
    engine_ids,
    prepare,
    prompt_usage,
    read_body,
    served_name,
)
from quire.server.routing import RouteTable
from quire.server.state import ServerState, state_of
from quire.types import RequestSpec as EngineRequest

router = RouteTable()
Prepared = tuple[Scoring, list[EngineRequest]]


@router.post("/score")
@router.post("/v1/score")
async def create_scores(request: Request) -> Response:
    """Score pairs of texts."""
    body = await read_body(request, ScoreRequest)
    pairs = make_pairs(body.queries, body.documents)
    scoring, requests = await prepare(request, body, partial(_prepare, pairs), num_prompts=len(pairs), n=1)

    def write(results: list[RequestUpdate]) -> dict[str, Any]:
        scores = scoring.scores(_vectors(results))
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return {**_list_head(request, "score"), "data": data, "usage": prompt_usage(requests)}

    return await answer(request, requests, write)


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def create_rerank(request: Request) -> Response:
    """Sort documents by their score with a query."""
    body = await read_body(request, RerankRequest)
    texts = [item if isinstance(item, str) else item.text for item in body.documents]
    pairs = make_pairs(body.query, texts)
    scoring, requests = await prepare(request, body, partial(_prepare, pairs), num_prompts=len(pairs), n=1)

    def write(results: list[RequestUpdate]) -> dict[str, Any]:
        scores = scoring.scores(_vectors(results))
        order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or len(texts)]
        ranked: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if body.return_documents is not False:
            ranked = [{**item, "document": {"text": texts[item["index"]]}} for item in ranked]
        head = {"id": new_id("rerank"), "model": served_name(request)}
        return {**head, "results": ranked, "usage": prompt_usage(requests)}

    return await answer(request, requests, write)


@router.post("/classify")
async def create_classification(request: Request) -> Response:
    """Return the probabilities of a classification head's labels."""
    body = await read_body(request, ClassifyRequest)
    prompts = prompt_list(body.input)
    requests = await prepare(request, body, _prepare_texts, num_prompts=len(prompts), n=1)
    labels = state_of(request).engines.front_end.config.model.labels

    def write(results: list[RequestUpdate]) -> dict[str, Any]:
        data = []
        for index, vector in enumerate(_vectors(results)):
            probs = probabilities(vector)
            label = labels[probs.index(max(probs))]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return {**_list_head(request, "classify"), "data": data, "usage": prompt_usage(requests)}

    return await answer(request, requests, write)


async def _prepare(pairs: Sequence[tuple[str, str]], state: ServerState, body: PairFields, caller: Caller) -> Prepared:
    return await state.work.prepare(caller, _scored, pairs, state, body, caller)


def _scored(pairs: Sequence[tuple[str, str]], state: ServerState, body: PairFields, caller: Caller) -> Prepared:
    front_end = state.engines.front_end
    model = front_end.config.model
    if model.labels or model.label_tokens:  # else each text is a prompt of its own
        check_shared("query", max(len(query) for query, _ in pairs), len(pairs))
    scoring = Scoring(
        model,
        front_end.tokenizer,
        pairs,
        max_prompt_len=front_end.max_prompt_len(body.truncate_prompt_tokens, None),
        max_document_len=body.max_tokens_per_doc,
    )
    return scoring, _requests(state, scoring.prompts, scoring.params, caller, body.priority)


async def _prepare_texts(state: ServerState, body: ClassifyRequest, caller: Caller) -> list[EngineRequest]:
    params = PoolingParams(task="classify")
    return await state.work.prepare(caller, _requests, state, prompt_list(body.input), params, caller, body.priority)


def _requests(
    state: ServerState,
    prompts: Sequence[str | list[int]],
    params: PoolingParams,
    caller: Caller,
    priority: int | None,
) -> list[EngineRequest]:
    front_end, identity = state.engines.front_end, caller.identity(priority)
    return [
        front_end.prepare(name, front_end.prompt(item), params, **identity)
        for name, item in zip(engine_ids(caller, len(prompts)), prompts, strict=True)
    ]


def _vectors(results: list[RequestUpdate]) -> list[list[float]]:
    return [update.embedding or [] for update in results]


def _list_head(request: Request, kind: str) -> dict[str, Any]:
    return {"id": new_id(kind), "object": "list", "created": timestamp(), "model": served_name(request)}
