"""B7: wrong keys at every route. Next to read: `plain_http.py`."""

import secrets

from benchmarks.soak.inputs.plain_http import Answer, Client, connected
from benchmarks.soak.row import Row
from benchmarks.soak.server import serving
from quire.server.gate import OPEN_PATHS
from quire.server.keys import VARIABLE
from quire.server.openapi import ENDPOINTS

NOT_FOUND = ("/v1", "/nowhere", "/v1/models/", "//v1/models", "/health/live/", "/Health/Live", "/health/live%2f")


def wrong_headers(key: str) -> dict[str, list[tuple[str, str]]]:
    """Ways not to have the key, as headers."""
    scheme = "Authorization"
    return {
        "none": [],
        "wrong": [(scheme, f"Bearer {key[::-1]}")],
        "prefix": [(scheme, f"Bearer {key[:-1]}")],
        "empty": [(scheme, "Bearer ")],
        "unicode": [(scheme, f"Bearer {key}é")],
        "doubled": [(scheme, f"Bearer {key}"), (scheme, f"Bearer {key}")],
        "lower-case scheme": [(scheme, f"bearer {key.upper()}")],
        "Host trick": [("Host", "localhost/health/live?")],
    }


def routes() -> list[tuple[str, str]]:
    """Return method and path of routes that need a key, and of routes that do not exist."""
    known = [(item.method.upper(), item.path.replace("{model_id}", "soak")) for item in ENDPOINTS]
    known += [("OPTIONS", path) for _, path in known] + [("GET", path) for path in NOT_FOUND]
    return [(method, path) for method, path in dict.fromkeys(known) if path not in OPEN_PATHS]


async def wrong_keys(model: str, *, key: str | None = None) -> Row:
    """B7."""
    secret = key or secrets.token_hex(16)
    row = Row("B7", f"{len(routes())} routes × {len(wrong_headers(secret))} kinds of wrong key")
    open_doors: list[str] = []
    with serving(model, environment={VARIABLE: secret}) as server:
        async with connected(server.url) as client:
            for method, path in routes():
                for kind, headers in wrong_headers(secret).items():
                    answer = await _ask(client, method, path, headers)
                    if answer.status != 401 or answer.error.get("code") != "invalid_api_key":
                        open_doors.append(f"{method} {path} {kind}: {answer.status}")
            right = [(await _ask(client, "GET", "/v1/models", [("Authorization", f"{scheme} {secret}")])).status
                     for scheme in ("Bearer", "bearer")]  # fmt: skip
    row.check("not 401", "; ".join([str(len(open_doors)), *open_doors[:5]]), passes=not open_doors)
    row.check("with the key", right, passes=right == [200, 200])
    return row


async def _ask(client: Client, method: str, path: str, headers: list[tuple[str, str]]) -> Answer:
    given = headers if any(name == "Host" for name, _ in headers) else [("Host", "localhost"), *headers]
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given), "Content-Length: 0"]
    return await client.send("\r\n".join(lines).encode() + b"\r\n\r\n")
