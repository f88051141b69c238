"""Adapters of a router: what it remembers of them is bounded."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from quire.server.router.adapters import MAX_UNLOADED, change_adapters
from quire.server.router.replica import LOAD_PATH, UNLOAD_PATH


class Agreeing:
    """A replica that does what it is told."""

    async def tell(self, path: str, body: bytes) -> tuple[int, bytes]:
        return 200, b"{}"

    async def read_models(self) -> bool:
        return True


def test_only_the_newest_names_are_remembered_as_unloaded() -> None:
    fleet: Any = SimpleNamespace(ready=[Agreeing()], adapters={})

    async def change() -> None:
        for number in range(MAX_UNLOADED + 10):
            for path in (LOAD_PATH, UNLOAD_PATH):
                await change_adapters(fleet, path, json.dumps({"lora_name": f"a{number}"}).encode())
        await change_adapters(fleet, LOAD_PATH, b'{"lora_name": "kept"}')
        await change_adapters(fleet, LOAD_PATH, b'{"lora_name": "a20"}')
        await change_adapters(fleet, UNLOAD_PATH, b'{"lora_name": "last"}')

    asyncio.run(change())
    unloaded = [name for name, body in fleet.adapters.items() if body is None]
    assert unloaded == [*(f"a{number}" for number in range(10, MAX_UNLOADED + 10) if number != 20), "last"]
    assert {name for name, body in fleet.adapters.items() if body is not None} == {"kept", "a20"}
