"""`quire serve`: the OpenAI-compatible server. Next to read: `quire/server/run.py`."""

import logging
from collections.abc import Callable
from typing import Any

import click

from quire.cli.command import output_of, verb
from quire.cli.options import chosen_options, option_flags
from quire.cli.progress import show_progress
from quire.config import EngineOptions
from quire.server.options import ServerOptions
from quire.weights.sources import resolve_source

EXAMPLES = ("quire serve", "quire serve ./model.gguf --port 8080 --max-num-seqs 64")
DEFAULTS = {"performance_mode": "interactivity"}
"""A server streams several answers: a long prompt must not stall them."""


@verb("serve", EXAMPLES, log_level="INFO")  # one line per request
@click.argument("model", required=False)
@option_flags(ServerOptions)
@option_flags(EngineOptions, without=frozenset({"data_parallel_rank"}), defaults=DEFAULTS)
def serve_command(model: str | None, **values: Any) -> None:
    """Serve a model over HTTP with OpenAI's API."""
    from quire.server.logs import use_format

    output = output_of()
    options = ServerOptions(**chosen_options(values, ServerOptions))
    if options.log_format == "json":
        use_format(options.log_format)
        output.logger = logging.getLogger("quire.server")  # programs read each line of stderr as JSON
    chosen = chosen_options(values, EngineOptions)
    if model is not None:
        source = click.get_current_context().get_parameter_source("engine_model")
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"the model is given twice: '{model}' and --model {chosen['model']}")
        chosen["model"] = model
    engine = EngineOptions.from_kwargs(**{**DEFAULTS, **chosen})
    with show_progress(output) as progress:
        # A missing model is reported before an engine process is started.
        resolve_source(engine.model, revision=engine.revision, progress=progress)
    counts = (("TP", engine.tensor_parallel_size), ("DP", engine.data_parallel_size))
    shape = "".join(f" · {name} {count}" for name, count in counts if count > 1)
    serve: Callable[..., None]
    if engine.data_parallel_size > 1:
        from quire.runtime.hardware import check_shares
        from quire.server.router.run import serve_replicas as serve

        check_shares(engine.data_parallel_size)
    else:
        from quire.server.run import serve
    serve(engine, options, on_ready=lambda url: output.note(f"serving {options.model_name(engine)} at {url}{shape}"))
