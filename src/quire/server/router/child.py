"""Main program of a replica's process: `python -m quire.server.router.child FD`, FD being its end of a socket pair.

It serves as `quire serve` does, on a free loopback port, until the router closes the socket or dies. It trusts the
callers' names that the router sends. Next to read: `processes.py`, the other end, and `../run.py`.
"""

import asyncio
import logging
import os
import signal
import socket
import sys

import msgspec

from quire.engine.process.messages import Refused
from quire.errors import QuireError
from quire.server.keys import ROUTER, KeyRing
from quire.server.router.processes import MAX_MESSAGE_BYTES, FromReplica, Serving, StartReplica
from quire.server.run import Service, bind, model_server, prepare_process


async def serve(connection: socket.socket) -> int:
    """Serve until the other end of the connection closes. Returns: the exit code."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_MESSAGE_BYTES)
    if not (line := await reader.readline()):
        return 0
    start = msgspec.json.decode(line, type=StartReplica)
    prepare_process(start.options)

    def tell(message: FromReplica) -> None:
        writer.write(msgspec.json.encode(message) + b"\n")

    try:
        with bind(start.options.host, start.options.port) as listener:
            build = model_server(
                {start.options.model_name(start.engine): start.engine}, start.options, KeyRing({start.key: ROUTER})
            )
            service = Service(listener, build, signals=())
            hung_up = asyncio.create_task(reader.read())
            hung_up.add_done_callback(lambda task: service.stop())
            await service.run(lambda url: tell(Serving(url)))
    except QuireError as error:
        tell(Refused.of(error))
        await writer.drain()
        return error.exit_code
    return 0


def main() -> int:
    """Entry point. The router decides when this process ends: it handles terminal signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    if level := os.environ.get("QUIRE_LOGGING_LEVEL"):  # the router's, which has checked it
        logging.getLogger("quire").setLevel(level.upper())
    try:
        return asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
    except ConnectionError:
        return 0  # the router is gone


if __name__ == "__main__":
    sys.exit(main())
