"""OpenAPI description of the server: `python -m quire.server.openapi` writes it to docs/openapi.json.

It is made from `ENDPOINTS` and the models in `protocol/`, never from a running server. Tests compare the routes and
their answers with it. Next to read: `routes/__init__.py`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from quire import __version__
from quire.server.errors import MESSAGES_PATH, is_messages_path
from quire.server.gate import OPEN_PATHS, QUEUED_PATHS, RERANK_PATHS, SCORE_PATHS
from quire.server.protocol.adapters import AdapterAnswer, LoadAdapterRequest, UnloadAdapterRequest
from quire.server.protocol.answers import ErrorAnswer, ModelCard, ModelList, SleepAnswer, StatusAnswer, VersionAnswer
from quire.server.protocol.chat import ChatCompletion, ChatRequest
from quire.server.protocol.messages import (
    CountTokensRequest,
    MessageObject,
    MessagesError,
    MessagesRequest,
    TokenCount,
)
from quire.server.protocol.prompts import (
    Completion,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    EmbeddingList,
    EmbeddingRequest,
    InfillAnswer,
    InfillRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from quire.server.protocol.responses import ResponseObject, ResponsesRequest
from quire.server.protocol.scores import (
    ClassifyAnswer,
    ClassifyRequest,
    RerankAnswer,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)

PATH = Path("docs") / "openapi.json"
REF = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "No key, or one that is not known.",
    404: "There is no such model or route.",
    405: "The route exists, but not for this method.",
    413: "The body is too large.",
    415: "The body is not JSON, or is compressed.",
    429: "Too many requests at once, or in a minute: try again after `Retry-After` seconds.",
    500: "The server failed on this request.",
    504: "The request took longer than the server allows.",
    503: "The engine is starting, or has died: try again after `Retry-After` seconds.",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Description of a route. `streams`: the answer can be server-sent events, OpenAI's. `query`: the parameter of the
    URL, and its values.
    """

    method: str
    path: str
    summary: str
    body: type[BaseModel] | None
    answer: type[BaseModel] | None
    streams: bool = False
    media_type: str = "application/json"
    query: tuple[str, tuple[str, ...]] | None = None

    @property
    def error(self) -> type[BaseModel]:
        """Return the shape of its errors."""
        return MessagesError if is_messages_path(self.path) else ErrorAnswer

    @property
    def is_open(self) -> bool:
        """Return whether the route needs no key."""
        return self.path in OPEN_PATHS

    @property
    def errors(self) -> tuple[int, ...]:
        """Return the statuses of its errors."""
        if self.is_open:
            return (503,)
        if self.body is None:
            found: tuple[int, ...] = (401, 404, 500, 503) if "{" in self.path else (401, 500, 503)
            return (400, 404, 429, *found) if self.method == "post" else found
        found = (400, 401, 404, 413, 415, 429, 500, 503)
        return (*found, 504) if self.path in QUEUED_PATHS else found


ENDPOINTS = (
    Endpoint("post", "/v1/chat/completions", "Answer a conversation", ChatRequest, ChatCompletion, streams=True),
    Endpoint("post", "/v1/completions", "Continue prompts", CompletionRequest, Completion, streams=True),
    Endpoint(
        "post", "/infill", "Fill in the text between prefix and suffix", InfillRequest, InfillAnswer, streams=True
    ),
    Endpoint(
        "post", "/v1/responses", "Answer a text or a conversation", ResponsesRequest, ResponseObject, streams=True
    ),
    Endpoint(
        "post", MESSAGES_PATH, "Answer a conversation, as Anthropic's API", MessagesRequest, MessageObject, streams=True
    ),
    Endpoint("post", MESSAGES_PATH + "/count_tokens", "Number of tokens of a prompt", CountTokensRequest, TokenCount),
    Endpoint("post", "/v1/embeddings", "Turn texts into vectors", EmbeddingRequest, EmbeddingList),
    *(Endpoint("post", path, "Score pairs of texts", ScoreRequest, ScoreList) for path in SCORE_PATHS),
    *(Endpoint("post", path, "Sort documents by a query", RerankRequest, RerankAnswer) for path in RERANK_PATHS),
    Endpoint("post", "/classify", "Probabilities of labels", ClassifyRequest, ClassifyAnswer),
    Endpoint("get", "/v1/models", "The models of this server", None, ModelList),
    Endpoint("get", "/v1/models/{model_id}", "One model", None, ModelCard),
    Endpoint("post", "/tokenize", "Token ids of a prompt or a conversation", TokenizeRequest, TokenizeAnswer),
    Endpoint("post", "/detokenize", "The text of token ids", DetokenizeRequest, DetokenizeAnswer),
    Endpoint("post", "/v1/load_lora_adapter", "Load an adapter", LoadAdapterRequest, AdapterAnswer),
    Endpoint("post", "/v1/unload_lora_adapter", "Unload an adapter", UnloadAdapterRequest, AdapterAnswer),
    Endpoint("post", "/sleep", "Free the memory of the model", None, SleepAnswer, query=("level", ("1", "2"))),
    Endpoint("post", "/wake_up", "Load the model again", None, SleepAnswer),
    Endpoint("get", "/is_sleeping", "Whether the model sleeps", None, SleepAnswer),
    Endpoint("get", "/version", "The server's version", None, VersionAnswer),
    Endpoint("get", "/health/live", "Whether the server makes progress", None, StatusAnswer),
    Endpoint("get", "/health/ready", "Whether requests are taken", None, StatusAnswer),
    Endpoint("get", "/health", "Whether requests are taken", None, StatusAnswer),
    Endpoint("get", "/ping", "Whether requests are taken", None, StatusAnswer),
    Endpoint("get", "/metrics", "Metrics for Prometheus", None, None, media_type="text/plain"),
    Endpoint("get", "/openapi.json", "This description", None, None),
)


def build_document() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = []
    for endpoint in ENDPOINTS:
        wanted.append((endpoint.error, "serialization"))
        if endpoint.body is not None:
            wanted.append((endpoint.body, "validation"))
        wanted += [] if endpoint.answer is None else [(endpoint.answer, "serialization")]
    _, schemas = models_json_schema(list(dict.fromkeys(wanted)), ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__, "description": "OpenAI-compatible API of `quire serve`."},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    plain = {"type": "object" if endpoint.media_type == "application/json" else "string"}
    content: dict[str, Any] = {
        endpoint.media_type: {"schema": plain if endpoint.answer is None else _ref(endpoint.answer)}
    }
    description = "The answer"
    if endpoint.streams:
        description = "The answer; with `stream: true`, server-sent events"
        # It has no schema: in OpenAPI 3.1 that would describe the whole stream, but readers apply it to each event.
        content["text/event-stream"] = {}
    name = endpoint.path.strip("/").replace("/", "_").replace("{", "").replace("}", "").replace(".", "_")
    operation: dict[str, Any] = {
        "operationId": f"{endpoint.method}_{name}",
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": description, "content": content},
            **{str(status): _error(status, endpoint.error) for status in sorted(endpoint.errors)},
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(endpoint.body)}}}
    if "{" in endpoint.path:
        operation["parameters"] = [
            {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if endpoint.query is not None:
        name, values = endpoint.query
        operation["parameters"] = [{"name": name, "in": "query", "schema": {"type": "string", "enum": list(values)}}]
    if endpoint.is_open:
        operation["security"] = []
    return operation


def _error(status: int, kind: type[BaseModel]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": ERRORS[status],
        "content": {"application/json": {"schema": _ref(kind)}},
    }
    if status in (429, 503):
        found["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}}
    return found


def _ref(kind: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": REF.format(model=kind.__name__)}


if __name__ == "__main__":
    PATH.write_text(json.dumps(build_document(), indent=1, ensure_ascii=False) + "\n")
