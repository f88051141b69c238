"""Values at Python's and the system's limits in every field, query and path: the client's error, never the server's."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire.server.openapi import ENDPOINTS, build_document
from tests.server.fake_engine import in_loop
from tests.server.served import Served, serving

VALUES = (
    "9" * 5000, "-1" + "0" * 400, "1" + "0" * 400, "1e400", "1e-400", "18446744073709551615", "9007199254740993",
    "[" * 5000 + "]" * 5000, "[" * 60 + "]" * 60, '{"a":' * 60 + "1" + "}" * 60, "[null]", "{}",
    '"\\u0000"', '"\\ud800"',
    *map(json.dumps, ("(" * 5000, "(" * 5000 + ")" * 5000, "a" * 5000, "/" * 5000, "../../etc/passwd", "")),
)  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"queries": "a", "documents": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/classify": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
QUERIES = ("9" * 5000, "-1", "%D9%A3", "%C2%B2", "1_000", "%00", "%ff", "(" * 5000, "..%2f..%2fetc/passwd", "%0d%0aa:b")


def fields(path: str) -> list[str]:
    (kind,) = {endpoint.body for endpoint in ENDPOINTS if endpoint.path == path}
    return [field.alias or name for name, field in kind.model_fields.items()]  # type: ignore[union-attr]


async def check(served: Served, method: str, path: str, body: bytes | None = None) -> None:
    answer = await served.answer(method, path, body=body)
    assert 200 <= answer.status < 500, (path[:200], (body or b"")[:200], answer.status, answer.body[:200])


def with_value(body: dict[str, Any], name: str, value: str) -> bytes:
    others = [f"{json.dumps(key)}:{json.dumps(item)}" for key, item in body.items() if key != name]
    return ("{" + ",".join([*others, f"{json.dumps(name)}:{value}"]) + "}").encode()


def test_every_route_with_a_body_is_tried() -> None:
    described = {
        path for path, operations in build_document()["paths"].items() if "requestBody" in operations.get("post", {})
    }
    assert described - {"/score", "/rerank", "/v2/rerank"} <= BODIES.keys()


@pytest.mark.parametrize("path", BODIES)
@in_loop
async def test_hostile_value_of_a_field_is_no_error_of_the_server(path: str) -> None:
    async with serving() as served:
        for name in fields(path):
            for value in VALUES:
                await check(served, "POST", path, with_value(BODIES[path], name, value))


def targets() -> Iterator[tuple[str, str]]:
    for value in QUERIES:
        for name in ("op_period", "op_interval_ms"):
            yield "GET", f"/xray/events?{name}={value}"
        for path in ("/xray/events", "/xray/explain", "/xray/ranks", "/is_sleeping", "/health/ready"):
            yield "GET", f"{path}?model={value}"
        for path in ("/sleep?level=", "/sleep?model=", "/wake_up?tags=", "/wake_up?model="):
            yield "POST", path + value
        for path in ("/v1/models/", "/page/", "/replica/prefix/", "/"):
            yield "GET", path + value
            yield "POST", path + value


@in_loop
async def test_hostile_query_or_path_is_no_error_of_the_server() -> None:
    async with serving() as served:
        for method, target in targets():
            await check(served, method, target, None if method == "GET" else b"{}")
