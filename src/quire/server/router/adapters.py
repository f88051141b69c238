"""`load` and `unload` of LoRA adapters on every replica of a router, and on those that become ready later.

Next to read: `replica.py`, `../routes/adapters.py`.
"""

import asyncio

import msgspec
from starlette.responses import Response

from quire.server.errors import ApiError
from quire.server.router.fleet import Fleet
from quire.server.router.replica import LOAD_PATH, UNLOAD_PATH, Replica

MAX_UNLOADED = 256
"""Names that are remembered as unloaded, for replicas that were away meanwhile."""


class _NamedAdapter(msgspec.Struct):
    lora_name: str


async def change_adapters(fleet: Fleet, path: str, body: bytes) -> Response:
    """Send a request to load or unload an adapter to all replicas.

    Returns: the answer of the first one; if any refuses, its refusal, and then the adapter is loaded nowhere.
    Raises: ApiError 503 if a replica cannot be asked.
    """
    if not (ready := fleet.ready):
        raise fleet.unavailable()
    name = _name_of(body)
    answers = await asyncio.gather(*(replica.tell(path, body) for replica in ready))
    good = [replica for replica, (status, _) in zip(ready, answers, strict=True) if status == 200]
    # A name that only some of them know is unloaded from these.
    is_done = len(good) == len(ready) or (path == UNLOAD_PATH and bool(good))
    if name is not None and is_done:
        fleet.adapters.pop(name, None)  # the newest comes last
        fleet.adapters[name] = body if path == LOAD_PATH else None
        unloaded = [known for known, loading in fleet.adapters.items() if loading is None]
        for known in unloaded[:-MAX_UNLOADED]:
            del fleet.adapters[known]
    elif name is not None and path == LOAD_PATH and name not in fleet.adapters:
        await asyncio.gather(*(_unload(replica, name) for replica in good))
    await asyncio.gather(*(replica.read_models() for replica in ready))
    status, answer = next(item for item in answers if (item[0] == 200) == is_done)
    if status == 503:
        raise ApiError(503, "a replica did not answer: try again in a moment", code="no_replica", retry_after_s=2)
    return Response(answer, status, media_type="application/json")


def _name_of(body: bytes) -> str | None:
    """Return the adapter that a body names; None if it is malformed, which each replica will say."""
    try:
        return msgspec.json.decode(body, type=_NamedAdapter).lora_name
    except (msgspec.MsgspecError, RecursionError):
        return None


async def _unload(replica: Replica, name: str) -> None:
    await replica.tell(UNLOAD_PATH, msgspec.json.encode(_NamedAdapter(name)))
