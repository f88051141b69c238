"""`quire serve`: the OpenAI-compatible server. Next to read: `quire/server/run.py`."""

import logging
from typing import Any

import click

from quire.cli.command import VerbCommand, output_of
from quire.cli.options import chosen_options, option_flags
from quire.cli.progress import show_progress
from quire.config import EngineOptions
from quire.server.options import ServerOptions
from quire.weights.sources import resolve_source

DEFAULTS = {"performance_mode": "interactivity"}
"""A server streams several answers: a long prompt must not stall them."""


@click.command(
    "serve",
    cls=VerbCommand,
    log_level="INFO",  # one line per request
    examples=("quire serve", "quire serve ./model.gguf --port 8080 --max-num-seqs 64"),
)
@click.argument("model", required=False)
@option_flags(ServerOptions)
@option_flags(EngineOptions, defaults=DEFAULTS)
def serve_command(model: str | None, **values: Any) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    output = output_of()
    from quire.server.logs import use_format

    options = ServerOptions(**chosen_options(values, ServerOptions))
    if options.log_format == "json":
        use_format(options.log_format)
        output.logger = logging.getLogger("quire.server")  # programs read each line of stderr as JSON
    chosen = chosen_options(values, EngineOptions)
    engine = EngineOptions.from_kwargs(**{**DEFAULTS, **chosen, **_named_model(model, chosen)})
    with show_progress(output) as progress:
        # A missing model is reported before an engine process is started.
        resolve_source(engine.model, revision=engine.revision, progress=progress)
    from quire.server.run import serve

    def announce(url: str) -> None:
        output.note(f"serving {options.model_name(engine)} at {url}")

    serve(engine, options, on_ready=announce)


def _named_model(word: str | None, chosen: dict[str, Any]) -> dict[str, str]:
    """Return the model argument, which overrides `QUIRE_MODEL`. Raises: click.UsageError if --model is given, too."""
    if word is None:
        return {}
    if click.get_current_context().get_parameter_source("engine_model") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(f"the model is given twice: '{word}' and --model {chosen['model']}")
    return {"model": word}
