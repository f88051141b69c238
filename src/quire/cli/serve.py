"""`quire serve`: the OpenAI-compatible server. Next to read: `quire/server/run.py`."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from quire.cli.command import output_of, verb
from quire.cli.options import chosen_options, option_flags
from quire.cli.terminal import show_progress
from quire.config import EngineOptions
from quire.garbage import without_collections
from quire.server.options import ServerOptions
from quire.weights.sources import resolve_source

EXAMPLES = (
    "quire serve",
    "quire serve ./model.gguf --port 8080 --max-num-seqs 64",
    "quire serve small=smollm2 large=./model.gguf --keep-alive 10m",
)
NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:-]*)=(.+)")
DEFAULTS = {"performance_mode": "interactivity"}
"""A server streams several answers: a long prompt must not stall them."""


@verb("serve", EXAMPLES, log_level="INFO")  # one line per request
@click.argument("models", nargs=-1, metavar="[[NAME=]MODEL]...")
@option_flags(ServerOptions)
@option_flags(EngineOptions, without=frozenset({"data_parallel_rank"}), defaults=DEFAULTS)
def serve_command(models: tuple[str, ...], **values: Any) -> None:
    """Serve a model over HTTP with OpenAI's API, or several: a request's `model` chooses.

    Several models are loaded when they are needed, as many at a time as fit in --models-memory-bytes. NAME is the
    model's name in the API; options hold for all models.
    """
    from quire.server.logs import use_format

    output = output_of()
    options = ServerOptions(**chosen_options(values, ServerOptions))
    if options.log_format == "json":
        use_format(options.log_format)
        output.logger = logging.getLogger("quire.server")  # programs read each line of stderr as JSON
    chosen = chosen_options(values, EngineOptions)
    if models:
        source = click.get_current_context().get_parameter_source("engine_model")
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"the model is given twice: '{models[0]}' and --model {chosen['model']}")
    by_name = named_models(models or (chosen.get("model", EngineOptions.model),), options.served_model_name)
    engines = {name: EngineOptions.from_kwargs(**{**DEFAULTS, **chosen, "model": by_name[name]}) for name in by_name}
    with show_progress(output) as progress:
        # A missing model is reported before an engine process is started.
        for engine in engines.values():
            resolve_source(engine.model, revision=engine.revision, progress=progress)
    (name, engine), *others = engines.items()
    options = replace(options, served_model_name=name)
    shape = f" · {engine.describe_ranks()}" if engine.num_ranks > 1 else ""
    if engine.data_parallel_size > 1:
        with without_collections():
            from quire.runtime.hardware import check_shares

        check_shares(engine.data_parallel_size)
        shape += f" · DP {engine.data_parallel_size}"
    with without_collections():
        from quire.server.run import serve

    serve(
        engine,
        options,
        others=dict(others),
        on_ready=lambda url: output.note(f"serving {', '.join(engines)} at {url}{shape}"),
    )


def named_models(models: Sequence[str], served_name: str | None) -> dict[str, str]:
    """Return the models by their names in the API. Raises: click.UsageError for a name that two models have."""
    found: dict[str, str] = {}
    if served_name is not None and len(models) > 1:
        raise click.UsageError("--served-model-name is for one model: write NAME=MODEL for each of several")
    for text in models:
        match = NAMED.fullmatch(text)
        name, model = match.groups() if match and not Path(text).exists() else (served_name or text, text)
        if name in found:
            raise click.UsageError(f"two models have the name '{name}': write NAME=MODEL with another name for one")
        found[name] = model
    return found
