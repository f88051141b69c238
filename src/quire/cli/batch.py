"""`quire batch`: a file of requests to a file of answers, in OpenAI's batch format, resumable at any time.

Next to read: `batch_run.py`, which reads and sends them; httpx2 comes with it and the help does without.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.command import ExitCode, option, output_of, verb
from quire.cli.options import OF_SERVE, chosen_options, option_flags
from quire.cli.server_client import ServerAnswerError, ServerClient, client_settings, find_model
from quire.cli.terminal import Output, format_seconds, show_progress, status_line
from quire.config import EngineOptions
from quire.errors import ModelNotFoundError
from quire.garbage import without_collections
from quire.server.options import ServerOptions
from quire.weights.sources import resolve_source

if TYPE_CHECKING:
    from quire.cli.batch_run import BatchCounts

EXAMPLES = (
    "quire batch in.jsonl -o out.jsonl",
    "quire batch in.jsonl -o out.jsonl --url http://127.0.0.1:8000 --concurrency 64",
)


@verb("batch", EXAMPLES)
@click.argument("source", metavar="IN", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@option(
    "-o",
    "--output",
    "target",
    metavar="OUT",
    required=True,
    help="file of the answers",
    type=click.Path(path_type=Path, dir_okay=False),
)
@option("--url", envvar="QUIRE_URL", help="a running server, instead of a new one  [QUIRE_URL]")
@option("-c", "--concurrency", type=click.IntRange(1, 4096), default=32, metavar="N", help="requests at once  [32]")
@option(
    "--retries",
    "max_retries",
    type=click.IntRange(0, 1000),
    default=20,
    metavar="N",
    help="times to ask a busy server again  [20]",
)
@option(
    "--timeout-s", type=click.FloatRange(1, 1e6), default=600.0, metavar="S", help="time to wait for one answer  [600]"
)
@option_flags(EngineOptions, without=OF_SERVE)
def batch_command(
    source: Path, target: Path, url: str | None, concurrency: int, max_retries: int, timeout_s: float, **values: Any
) -> None:
    """Answer a file of requests, in OpenAI's batch format.

    Each line of IN is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}; each line of OUT
    {"id", "custom_id", "response", "error"}, in the order in which the answers come. IN "-" reads standard input. The
    next run of the same command skips the requests that have succeeded and sends the others, so a batch may be stopped
    at any time; a request that was changed after it was answered is an error. Without --url, a server of the model runs
    on this machine as long as the batch does. The exit code is 6 if a line failed.
    """
    from quire.cli.batch_run import STDIN, AnswerFile, BatchCounts, BatchRun, read_requests

    ctx = click.get_current_context()
    output = output_of(ctx)
    if url is not None:
        _refuse_engine_options(ctx)
    if str(target) == STDIN:
        raise click.UsageError("-o needs a file: the answers are kept for the next run")
    chosen = chosen_options(values, EngineOptions)
    options = EngineOptions.from_kwargs(**chosen)
    requests = read_requests(source)
    counts = BatchCounts(len(requests))
    start_s = time.monotonic()
    with AnswerFile(target) as answers, status_line(output) as show:
        answers.check_unchanged(requests)
        pending = [request for request in requests if request.custom_id not in answers.done]
        counts.num_skipped = len(requests) - len(pending)
        run = BatchRun(
            answers,
            counts,
            concurrency,
            max_retries,
            lambda: show("", progress_text(counts, time.monotonic() - start_s)),
        )

        needs_server = any(request.problem is None for request in pending)

        async def answer() -> None:
            if not needs_server:
                await run.send(pending)
            elif url is not None:
                model = _default_model(url, chosen.get("model"))
                await run.send(pending, client_settings(url, read_s=timeout_s), model)
            else:
                async with own_server(options) as where:
                    await run.send(pending, client_settings(where, read_s=timeout_s), options.model)

        if url is None and needs_server:
            with show_progress(output) as progress:
                resolve_source(options.model, revision=options.revision, progress=progress)
            output.detail(f"starting a server of {options.model}")
        asyncio.run(answer())
    _report(output, counts, target)
    if counts.num_failed:
        ctx.exit(int(ExitCode.CHECK_FAILED))


def _refuse_engine_options(ctx: click.Context) -> None:
    """Refuse options of the engine, except the model's name, for a server that runs already."""
    for parameter in ctx.command.params:
        name = parameter.name or ""
        is_given = ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if name.startswith("engine_") and name != "engine_model" and is_given:
            raise click.UsageError(
                f"{parameter.opts[0]} is the engine's, which --url has already: leave one of them out"
            )


def _default_model(url: str, named: str | None) -> str | None:
    """Return the model of bodies that name none. Raises: ServerUnreachableError, if no server answers."""
    with ServerClient(url) as client:
        try:
            return find_model(client, named).name
        except ModelNotFoundError:
            return None
        except ServerAnswerError as error:
            if error.http_status in (401, 403):
                raise
            return None


@contextlib.asynccontextmanager
async def own_server(options: EngineOptions) -> AsyncIterator[str]:
    """Yield the URL of a server of the model, on a free port, in this event loop; its engine is a process of its own.

    Raises: ConfigError, ModelError, CapacityError, EngineDeadError.
    """
    with without_collections():
        from quire.server.registration import registered
        from quire.server.run import Service, bind, model_server, prepare_process, url_of

    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server_options = ServerOptions(port=0, drain_timeout_s=0)
    prepare_process(server_options)
    name = server_options.model_name(options)
    with bind(server_options.host, server_options.port) as listener, registered(url_of(listener), name):
        build = model_server({name: options}, server_options)
        service = Service(listener, build, signals=())
        serving = asyncio.create_task(service.run(ready.set_result))
        try:
            await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                yield ready.result()
        finally:
            service.stop()
            await serving


def progress_text(counts: "BatchCounts", passed_s: float) -> str:
    """Return "120/1000 · 3 failed · 45 tok/s · 5.00 s", without the parts that are zero."""
    parts = [f"{counts.num_done}/{counts.num_requests}"]
    if counts.num_failed:
        parts.append(f"{counts.num_failed} failed")
    if counts.num_tokens and passed_s > 0:
        parts.append(f"{counts.num_tokens / passed_s:.0f} tok/s")
    return " · ".join([*parts, format_seconds(passed_s)])


def _report(output: Output, counts: "BatchCounts", target: Path) -> None:
    if output.json:
        output.result_json("quire.batch/1", {**dataclasses.asdict(counts), "output": str(target)})
        return
    text = "1 answer" if counts.num_succeeded == 1 else f"{counts.num_succeeded} answers"
    if counts.num_skipped:
        text += f", {counts.num_skipped} were there already"
    if num_again := counts.num_failed - counts.num_invalid:
        text += f", {num_again} failed: run the same command to try {'it' if num_again == 1 else 'them'} again"
    if counts.num_invalid:
        lines = "line is" if counts.num_invalid == 1 else "lines are"
        text += f", {counts.num_invalid} {lines} wrong, as {target} says: correct them first"
    output.note(f"{text} · {target}", style="red" if counts.num_failed else "dim")
