import json

import pytest

from quire.server import refusals
from quire.server.refusals import Refusal

ALL = [item for item in vars(refusals).values() if isinstance(item, Refusal)]


@pytest.mark.parametrize("refusal", ALL, ids=lambda item: f"{item.status}-{item.code}")
def test_a_refusal_is_a_whole_answer_in_openais_shape(refusal: Refusal) -> None:
    head, _, body = refusal.response().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0].startswith(f"HTTP/1.1 {refusal.status} ")
    assert "connection: close" in lines
    assert f"content-length: {len(body)}" in lines
    error = json.loads(body)["error"]
    assert (error["code"], error["param"]) == (refusal.code, None)
    assert set(error) == {"message", "type", "param", "code"}
