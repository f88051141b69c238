"""`quire batch`: a file of requests to a file of answers, in OpenAI's batch format, resumable at any time.

Next to read: `batch_files.py`, `batch_run.py`.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.batch_files import STDIN, AnswerFile, check_output, read_requests
from quire.cli.command import GroupedOption, VerbCommand, output_of
from quire.cli.exit_codes import ExitCode
from quire.cli.options import chosen_options, option_flags
from quire.cli.output import Output, format_seconds
from quire.cli.progress import LINE_INTERVAL_S, draws_bars, show_progress
from quire.cli.server_client import ServerAnswerError, ServerClient, client_settings, find_model
from quire.config import EngineOptions
from quire.errors import EngineDeadError, ModelNotFoundError, QuireError
from quire.weights.sources import resolve_source

if TYPE_CHECKING:
    from quire.cli.batch_run import BatchCounts

HELP = """Answer a file of requests, in OpenAI's batch format.

Each line of IN is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}; each line of OUT
{"id", "custom_id", "response", "error"}, in the order in which the answers come. IN "-" reads standard input. The
next run of the same command skips the requests that have succeeded and sends the others, so a batch may be stopped at
any time; a request that was changed after it was answered is an error. Without --url, a server of the model runs on
this machine as long as the batch does. The exit code is 6 if a line failed.
"""
EXAMPLES = (
    "quire batch in.jsonl -o out.jsonl",
    "quire batch in.jsonl -o out.jsonl --url http://127.0.0.1:8000 --concurrency 64",
)
REDRAW_S = 0.2
STOP_S = 10.0


@click.command("batch", cls=VerbCommand, help=HELP, short_help="Answer a file of requests.", examples=EXAMPLES)
@click.argument("source", metavar="IN", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@click.option("-o", "--output", "target", metavar="OUT", required=True, cls=GroupedOption, help="file of the answers",
              type=click.Path(path_type=Path, dir_okay=False))  # fmt: skip
@click.option(
    "--url", envvar="QUIRE_URL", cls=GroupedOption, help="a running server, instead of a new one  [QUIRE_URL]"
)
@click.option("-c", "--concurrency", type=click.IntRange(1, 4096), default=32, metavar="N", cls=GroupedOption,
              help="requests at once  [32]")  # fmt: skip
@click.option("--retries", "max_retries", type=click.IntRange(0, 1000), default=20, metavar="N", cls=GroupedOption,
              help="times to ask a busy server again  [20]")  # fmt: skip
@click.option("--timeout-s", type=click.FloatRange(1, 1e6), default=600.0, metavar="S", cls=GroupedOption,
              help="time to wait for one answer  [600]")  # fmt: skip
@option_flags(EngineOptions)
def batch_command(
    source: Path, target: Path, url: str | None, concurrency: int, max_retries: int, timeout_s: float, **values: Any
) -> None:
    """Check the files, then find or start a server and send everything."""
    from quire.cli.batch_run import BatchCounts, BatchRun

    ctx = click.get_current_context()
    output = output_of(ctx)
    if url is not None:
        _refuse_engine_options(ctx)
    if str(target) == STDIN:
        raise click.UsageError("-o needs a file: the answers are kept for the next run")
    options = EngineOptions.from_kwargs(**chosen_options(values, EngineOptions))
    check_output(target)
    requests = read_requests(source)
    counts = BatchCounts(len(requests))
    with AnswerFile(target) as answers, _progress(output) as on_change:
        answers.check_unchanged(requests)
        pending = [request for request in requests if request.custom_id not in answers.done]
        counts.num_skipped = len(requests) - len(pending)
        run = BatchRun(answers, counts, concurrency, max_retries, on_change=on_change)
        if all(request.problem for request in pending):
            run.run(pending)  # nothing to send: no server is needed
        else:
            with contextlib.nullcontext(url) if url is not None else _own_server(options, output) as where:
                run.settings = client_settings(where, read_s=timeout_s)
                run.model = options.model if url is None else _default_model(where, _named_model(ctx, options))
                run.run(pending)
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


def _named_model(ctx: click.Context, options: EngineOptions) -> str | None:
    source = ctx.get_parameter_source("engine_model")
    return options.model if source is not click.core.ParameterSource.DEFAULT else None


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


@contextlib.contextmanager
def _own_server(options: EngineOptions, output: Output) -> Iterator[str]:
    with show_progress(output) as progress:
        resolve_source(options.model, revision=options.revision, progress=progress)
    output.detail(f"starting a server of {options.model}")
    with own_server(options) as url:
        yield url


@contextlib.contextmanager
def own_server(options: EngineOptions) -> Iterator[str]:
    """Yield the URL of a server of this model, on a free port, in a child process that ends with this one.

    Raises: ConfigError, ModelError, CapacityError, EngineDeadError.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(options, theirs), name="quire-batch-server")
    # On a terminal Ctrl-C comes to all processes: hold it back from the child while that imports. The resource tracker
    # would let it through again if it were started below.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    try:
        try:
            found = ours.recv()
        except EOFError:
            raise EngineDeadError("the server of the batch ended before it was ready") from None
        if isinstance(found, QuireError):
            raise found
        yield found
    finally:
        ours.close()  # the child ends, without a drain
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(options: EngineOptions, connection: Connection) -> None:
    """Serve in the child process. The parent handles Ctrl-C: it writes the answers it has, then ends the child."""
    from quire.server.options import ServerOptions
    from quire.server.run import serve

    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # discards one that was held back
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        serve(options, ServerOptions(port=0, drain_timeout_s=0), on_ready=connection.send)
    except QuireError as error:
        with contextlib.suppress(OSError):
            connection.send(error)


def _end_with(connection: Connection) -> None:
    """Stop when the parent closes its end, or dies."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _progress(output: Output) -> Iterator[Callable[["BatchCounts"], None]]:
    """Yield the callback of `BatchRun`: a line that is redrawn on a terminal, else one every ten seconds."""
    if output.verbosity < 0:
        yield lambda counts: None
        return
    redraws = draws_bars()
    start_s = time.monotonic()
    next_s = start_s + (0.0 if redraws else LINE_INTERVAL_S)

    def show(counts: "BatchCounts") -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s < next_s:
            return
        next_s = now_s + (REDRAW_S if redraws else LINE_INTERVAL_S)
        text = progress_text(counts, now_s - start_s)
        if redraws:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        else:
            output.note(text)

    try:
        yield show
    finally:
        if redraws:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


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
