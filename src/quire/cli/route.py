"""`quire route`: one address for servers that run already. Next to read: `quire/server/router/run.py`."""

import logging
from typing import Any

import click

from quire.cli.command import output_of, verb
from quire.cli.options import chosen_options, option_flags
from quire.garbage import without_collections
from quire.server.options import ServerOptions

EXAMPLES = (
    "quire route http://127.0.0.1:8001 http://127.0.0.1:8002",
    "quire route http://a:8000 http://b:8000 --router-policy least-loaded --port 9000",
)
OF_A_MODEL = frozenset({
    "served_model_name", "metrics_names", "reasoning_format", "xray_text", "max_queued_requests", "max_queued_tokens",
    "queue_timeout_s", "request_timeout_s",
})  # fmt: skip
"""Options that the replicas have."""


@verb("route", EXAMPLES, log_level="INFO")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@option_flags(ServerOptions, without=OF_A_MODEL)
def route_command(urls: tuple[str, ...], **values: Any) -> None:
    """Share requests among servers that run already.

    Each URL is a server of `quire serve`, here or on another machine; servers of other engines are placed by load. A
    server that does not answer gets no requests until it does. Servers that need a key get that of
    QUIRE_UPSTREAM_API_KEY.
    """
    with without_collections():
        from quire.server.logs import use_format
        from quire.server.router.run import route

    output = output_of()
    options = ServerOptions(**chosen_options(values, ServerOptions))
    if options.log_format == "json":
        use_format(options.log_format)
        output.logger = logging.getLogger("quire.server")  # programs read each line of stderr as JSON

    def on_ready(url: str, num_ready: int) -> None:
        output.note(f"routing to {num_ready} of {len(urls)} replicas at {url} · {options.router_policy}")

    route(urls, options, on_ready=on_ready)
