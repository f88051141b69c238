"""What a server tells routers, with a real server on real sockets."""

import asyncio

import msgspec

from quire.server.announcements import Announcement
from quire.server.keys import ROUTER, KeyRing
from tests.server.fake_engine import in_loop
from tests.server.served import serving

KEYS = {"key-a": "ann", "key-b": "bob", "key-c": ROUTER}


@in_loop
async def test_ended_requests_are_announced_to_their_own_key_and_to_the_routers() -> None:
    async with serving(keys=KeyRing(KEYS)) as server:
        streams = {}
        for key, name in KEYS.items():
            reader, writer = streams[name] = await server.connect()
            head = f"GET /replica/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n\r\n"
            writer.write(head.encode())
            await reader.readuntil(b"data: ")
        for key, name in list(KEYS.items())[:2]:
            await server.chat(headers={"Authorization": f"Bearer {key}", "X-Request-Id": f"of-{name}"})
        found = {}
        for name, (reader, writer) in streams.items():
            ended: list[str] = []
            while len(ended) < (2 if name == ROUTER else 1):
                line = await asyncio.wait_for(reader.readline(), 20)
                if line.startswith(b"data: "):
                    announced = msgspec.json.decode(line[6:], type=Announcement)
                    ended += [item.request_id for item in announced.ended]
            found[name] = ended
            writer.close()
        assert found == {"ann": ["of-ann"], "bob": ["of-bob"], ROUTER: ["of-ann", "of-bob"]}
