"""`quire batch`: a file of requests to a file of answers, in OpenAI's batch format, resumable at any time.

Next to read: `batch_files.py`, `batch_run.py`.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from quire.cli.batch_files import AnswerFile, check_output
from quire.cli.batch_requests import STDIN, check_ids, open_requests, read_requests
from quire.cli.batch_run import BatchCounts, BatchRun
from quire.cli.batch_server import own_server
from quire.cli.chat_client_answers import find_model
from quire.cli.command import GroupedOption, VerbCommand, output_of
from quire.cli.exit_codes import ExitCode
from quire.cli.options import chosen_engine_options, engine_options
from quire.cli.output import Output, format_seconds
from quire.cli.progress import LINE_INTERVAL_S, draws_bars, show_progress
from quire.cli.server_client import ServerAnswerError, ServerClient, client_settings
from quire.cli.session import configure_logging
from quire.config import EngineOptions
from quire.errors import ModelNotFoundError
from quire.weights.sources import resolve_source

HELP = """Answer a file of requests, in OpenAI's batch format.

Each line of IN is {"custom_id", "method": "POST", "url": "/v1/chat/completions", "body"}; each line of OUT
{"id", "custom_id", "response", "error"}, in the order in which the answers come. IN "-" reads standard input. Run
again, it skips what has succeeded and asks for the rest, so a batch may be stopped at any time; a request that was
changed after it was answered is an error. Without --url, a server of the model runs on this machine as long as the
batch does. The exit code is 6 if a line failed.
"""
EXAMPLES = (
    "quire batch in.jsonl -o out.jsonl",
    "quire batch in.jsonl -o out.jsonl --url http://127.0.0.1:8000 --concurrency 64",
)
REDRAW_S = 0.2


@click.command("batch", cls=VerbCommand, help=HELP, short_help="Answer a file of requests.", examples=EXAMPLES)
@click.argument("source", metavar="IN", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@click.option("-o", "--output", "target", metavar="OUT", required=True, cls=GroupedOption, help="file of the answers",
              type=click.Path(path_type=Path, dir_okay=False))  # fmt: skip
@click.option("--url", envvar="QUIRE_URL", cls=GroupedOption, help="a server, instead of one of its own  [QUIRE_URL]")
@click.option("-c", "--concurrency", type=click.IntRange(1, 4096), default=32, metavar="N", cls=GroupedOption,
              help="requests at once  [32]")  # fmt: skip
@click.option("--retries", "max_retries", type=click.IntRange(0, 1000), default=20, metavar="N", cls=GroupedOption,
              help="times to ask a busy server again  [20]")  # fmt: skip
@click.option("--timeout-s", type=click.FloatRange(1, 1e6), default=600.0, metavar="S", cls=GroupedOption,
              help="time to wait for one answer  [600]")  # fmt: skip
@engine_options()
def batch_command(
    source: Path, target: Path, url: str | None, concurrency: int, max_retries: int, timeout_s: float, **values: Any
) -> None:
    """Check the files, then find or start a server and send everything."""
    ctx = click.get_current_context()
    output = output_of(ctx)
    if url is not None:
        _refuse_engine_options(ctx)
    if str(target) == STDIN:
        raise click.UsageError("-o needs a file: the answers are kept for the next run")
    options = EngineOptions.from_kwargs(**chosen_engine_options(values))
    check_output(target)
    with open_requests(source) as requests:
        counts = BatchCounts(check_ids(requests))
        with AnswerFile(target) as answers, _progress(output) as on_change:
            answers.check_unchanged(read_requests(requests))
            if all(request.custom_id in answers.done for request in read_requests(requests)):
                counts.num_skipped = counts.num_requests
            else:
                named = _named_model(ctx, options)
                with _server(url, options, output) as where:
                    model = _default_model(where, named) if url is not None else options.model
                    BatchRun(
                        client_settings(where, read_s=timeout_s), answers, counts, concurrency=concurrency,
                        max_retries=max_retries, model=model, on_change=on_change,
                    ).run(read_requests(requests))  # fmt: skip
    _report(output, counts, target)
    if counts.num_failed:
        ctx.exit(int(ExitCode.CHECK_FAILED))


def _refuse_engine_options(ctx: click.Context) -> None:
    """With a server of someone else, nothing of the engine can be chosen but the model's name."""
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
    """The model of bodies that name none. Raises: ServerUnreachableError, if there is no server at all."""
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
def _server(url: str | None, options: EngineOptions, output: Output) -> Iterator[str]:
    if url is not None:
        yield url
        return
    configure_logging(output)
    with show_progress(output) as progress:
        resolve_source(options.model, revision=options.revision, progress=progress)
    output.detail(f"starting a server of {options.model}")
    with own_server(options) as own_url:
        yield own_url


@contextlib.contextmanager
def _progress(output: Output) -> Iterator[Any]:
    """Yield the callback of `BatchRun`: a line that is redrawn on a terminal, else one every ten seconds."""
    if output.verbosity < 0:
        yield lambda counts: None
        return
    redraws = draws_bars()
    start_s = time.monotonic()
    next_s = start_s + (0.0 if redraws else LINE_INTERVAL_S)

    def show(counts: BatchCounts) -> None:
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


def progress_text(counts: BatchCounts, passed_s: float) -> str:
    """ "120/1000 · 3 failed · 45 tok/s · 5.00 s"; only what is there."""
    parts = [f"{counts.num_done}/{counts.num_requests}"]
    if counts.num_failed:
        parts.append(f"{counts.num_failed} failed")
    if counts.num_tokens and passed_s > 0:
        parts.append(f"{counts.num_tokens / passed_s:.0f} tok/s")
    return " · ".join([*parts, format_seconds(passed_s)])


def _report(output: Output, counts: BatchCounts, target: Path) -> None:
    if output.json:
        output.result_json("quire.batch/1", {**dataclasses.asdict(counts), "output": str(target)})
        return
    skipped = f", {counts.num_skipped} were there already" if counts.num_skipped else ""
    num_again = counts.num_failed - counts.num_invalid
    them = "it" if num_again == 1 else "them"
    failed = f", {num_again} failed: run the same command to try {them} again" if num_again else ""
    lines = "line is" if counts.num_invalid == 1 else "lines are"
    invalid = (
        f", {counts.num_invalid} {lines} wrong, as {target} says: correct them first" if counts.num_invalid else ""
    )
    style = "red" if counts.num_failed else "dim"
    answers = "1 answer" if counts.num_succeeded == 1 else f"{counts.num_succeeded} answers"
    output.note(f"{answers}{skipped}{failed}{invalid} · {target}", style=style)
