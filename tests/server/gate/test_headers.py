import asyncio

from quire.server.gate.headers import adding, header_value, header_values, with_headers

SCOPE = {"headers": [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]}


def test_values_of_a_header() -> None:
    assert header_values(SCOPE, b"a") == [b"1", b"3"]
    assert header_value(SCOPE, b"b") == b"2"
    assert header_value(SCOPE, b"a") is None, "one that comes twice has no value"
    assert header_value(SCOPE, b"c") is None


def test_headers_are_added_to_the_first_message_only() -> None:
    sent = []

    async def send(message: dict) -> None:
        sent.append(message)

    async def main() -> None:
        wrapped = adding(send, [(b"x", b"y")])
        await wrapped({"type": "http.response.start", "status": 200})
        await wrapped({"type": "http.response.body", "body": b""})

    asyncio.run(main())
    assert sent == [
        {"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]},
        {"type": "http.response.body", "body": b""},
    ]


def test_a_message_is_not_changed_in_place() -> None:
    message = {"type": "http.response.start", "headers": [(b"a", b"b")]}
    assert with_headers(message, [(b"c", b"d")])["headers"] == [(b"a", b"b"), (b"c", b"d")]
    assert message["headers"] == [(b"a", b"b")]
