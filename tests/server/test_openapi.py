"""docs/openapi.json is the description of this source. Schemathesis holds answers to it: test_conformance.py."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from quire.server.openapi import ENDPOINTS, build_document
from tests.server.fake_engine import make_server

ROOT = Path(__file__).parents[2]
UNDESCRIBED = ("/page/", "/xray/", "/lab/")
"""Routes of the page."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Return the description, which takes half a second to build."""
    return build_document()


def test_openapi_json_is_up_to_date(document: dict[str, Any]) -> None:
    written = (ROOT / "docs" / "openapi.json").read_text()
    assert json.loads(written) == json.loads(json.dumps(document)), (
        "run `make docs`, or `python -m quire.server.openapi`"
    )


def test_all_references_resolve_and_all_schemas_are_valid(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    names = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert names == set(schemas)
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)


def test_every_error_has_the_shape_of_its_api(document: dict[str, Any]) -> None:
    for endpoint in ENDPOINTS:
        shape = "/MessagesError" if endpoint.path.startswith("/v1/messages") else "/ErrorAnswer"
        answers = document["paths"][endpoint.path][endpoint.method]["responses"]
        for status, answer in answers.items():
            if status != "200":
                assert answer["content"]["application/json"]["schema"]["$ref"].endswith(shape)
        assert endpoint.is_open or "401" in answers


def test_event_streams_have_no_schema(document: dict[str, Any]) -> None:
    """In OpenAPI 3.1 it would be the schema of the whole stream, and generic testers apply it to each event."""
    for endpoint in ENDPOINTS:
        answer = document["paths"][endpoint.path][endpoint.method]["responses"]["200"]
        assert answer["content"].get("text/event-stream") == ({} if endpoint.streams else None)


def test_requests_are_strict_and_messages_are_not(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert all(schemas[name]["additionalProperties"] is False for name in ("ChatRequest", "ReasoningOptions", "Tool"))
    assert not any("additionalProperties" in schemas[name] for name in ("Message", "ToolCall", "InputReasoning"))


def test_every_route_is_described() -> None:
    app, _ = make_server()
    described = {(endpoint.method.upper(), endpoint.path) for endpoint in ENDPOINTS}
    others = {path for method, path in routes(app.routes) if (method, path) not in described}
    assert {path for path in others if path != "/" and not path.startswith(UNDESCRIBED)} == set()


def routes(items: object) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for item in items:  # type: ignore[attr-defined]
        inner = getattr(item, "original_router", None)
        if inner is not None:
            found += routes(inner.routes)
        else:
            found += [(method, item.path.replace(":path}", "}")) for method in item.methods - {"HEAD"}]
    return found
