"""`quire view`: draws one step of a recording or of a running server, or a layer of a model.

Next to read: `../insight/view.py`, `../insight/view_layer.py`, `../insight/view_ranks.py`.
"""

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from quire.cli.command import option, output_of, verb
from quire.cli.language import is_english, lang_option
from quire.cli.progress import show_progress
from quire.cli.server_client import ServerClient, find_url, url_option
from quire.config import DTYPE_ALIASES, DTYPES, EngineOptions

if TYPE_CHECKING:
    from quire.insight.picture import Picture
    from quire.insight.trace import EngineTrace

OF_STEPS = ("mask", "blocks", "step", "ops")
OF_MODELS = ("layer", "ranks")
LIVE_LINES = 2000
EXAMPLES = (
    "quire view blocks sky.jsonl",
    "quire view mask sky.jsonl --step 1 --svg mask.svg",
    "quire view ops sky.jsonl --by layer",
    "quire view step --url http://127.0.0.1:8000",
    "quire view layer qwen3-4b --tokens 128",
    "quire view ranks smollm2 --tp 3",
)
ONLY = {"step": OF_STEPS, "url": OF_STEPS, "by": ("ops",), "tokens": ("layer",), "start": ("layer",),
        "layer": OF_MODELS, "tp": OF_MODELS, "dtype": OF_MODELS, "device": OF_MODELS}  # fmt: skip
"""Per option the pictures that it belongs to."""
AUTO = "auto"


@verb("view", EXAMPLES)
@click.argument("what", type=click.Choice((*OF_STEPS, *OF_MODELS)), metavar="WHAT")
@click.argument("subject", required=False, metavar="[RECORDING|MODEL]")
@option("--step", type=int, metavar="N", help="number of the step  [the newest; of mask that with most requests]")
@option("--by", type=click.Choice(("kind", "layer")), help="add up instructions by kind or by layer  [kind]")
@option("--layer", type=click.IntRange(min=0), metavar="N", help="layer of the model  [0]")
@option("--tokens", type=click.IntRange(min=1), metavar="N", help="tokens that the layer computes  [128]")
@option("--start", type=click.IntRange(min=0), metavar="N", help="tokens before them, in the KV cache  [0]")
@option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="ranks that share each layer  [1, of ranks 2]",
)
@option("--dtype", type=click.Choice((AUTO, *DTYPES, *DTYPE_ALIASES)), help="compute type  [auto]")
@option("--device", metavar="NAME|FILE", help="device of the model, as for explain  [auto]")
@option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="write an SVG file")
@option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="write an HTML file")
@url_option
@lang_option
def view_command(
    what: str, subject: str | None, svg: str | None, html: str | None, translate: Callable[[str], str], **values: Any
) -> None:
    """Draw one step: its attention mask, the KV blocks, its place among the last steps, or its instructions.

    WHAT is mask, blocks, step or ops of a step; or layer or ranks of a model: one layer with its values, shapes and
    work, and the same layer cut over --tp ranks. The step is the newest one of RECORDING (see `quire trace`), of mask
    the one with most requests, unless --step names another; without a RECORDING it is the next one of a running
    server. MODEL is any that `quire explain` takes. --svg and --html write a file instead of text.
    """
    from quire.insight.picture import to_html

    output, given = output_of(), {name: value for name, value in values.items() if value is not None}
    for name in given:
        if what not in ONLY[name]:
            flag = f"--{name}"
            raise click.UsageError(f"{flag} is an option of `quire view {'` and `'.join(ONLY[name])}`: leave it out")
    facts: dict[str, Any]
    if what in OF_MODELS:
        name = subject or EngineOptions.model
        picture, facts = _of_model(what, name, **given), {"model": name}
    else:
        picture, step_id = _of_step(what, subject, **given)
        facts = {"step": step_id}
    if not output.json and not is_english(translate):
        picture = picture.translated(translate)
    drawn = picture.to_svg() if svg or html else ""
    for name, path, text in (("--svg", svg, drawn), ("--html", html, to_html(picture.title, [drawn]))):
        if path:
            output.write_file(name, path, text)
    if output.json:
        cells = [{"label": row.label, "cells": list(row.cells), "remark": row.remark} for row in picture.rows]
        told = {"caption": picture.caption, "formula": picture.formula, "source": picture.source}
        output.result_json("quire.view/1", {"what": what, **facts, **told, "rows": cells})
    elif not svg and not html:
        output.result(picture.to_text())


def _of_step(
    what: str, recording: str | None, *, step: int | None = None, by: str = "kind", url: str | None = None
) -> "tuple[Picture, int]":
    """Draw a step. Returns: the picture and the step's number."""
    from quire.insight.trace import EngineTrace
    from quire.insight.view import VIEWS, fullest_step, view_layers

    output = output_of()
    if not recording:
        output.note("waiting for the server's next step")
    trace = EngineTrace.read(recording) if recording else _fetch(url)
    if trace.is_cut:
        output.note(f"{recording}: the last line is incomplete and was left out", style="yellow")
    chosen = fullest_step(trace) if what == "mask" and step is None else trace.step(step)
    return (view_layers if by == "layer" else VIEWS[what])(trace, chosen), chosen["step_id"]


def _of_model(
    what: str,
    model: str,
    *,
    layer: int = 0,
    tokens: int = 128,
    start: int = 0,
    tp: int | None = None,
    dtype: str = AUTO,
    device: str = AUTO,
) -> "Picture":
    """Draw a layer of a model, or its ranks."""
    from quire.insight.explain.settings import Settings
    from quire.insight.explain.subject import open_subject
    from quire.insight.view_layer import view_layer
    from quire.insight.view_ranks import view_ranks

    with show_progress(output_of()) as progress:
        checkpoint = open_subject(model, progress)
    tp = (2 if what == "ranks" else 1) if tp is None else tp
    settings = Settings(tp=tp, batches=(1,), ctx=start + tokens, dtype=dtype, device=device)
    if what == "ranks":
        return view_ranks(checkpoint, settings, layer=layer)
    return view_layer(checkpoint, settings, layer=layer, start=start)


def _fetch(url: str | None) -> "EngineTrace":
    """Watch a server until it has computed a step."""
    from quire.insight.trace import EngineTrace

    lines: list[str] = []
    with ServerClient(find_url(url)) as client, closing(client.event_lines("/xray/events?op_period=1")) as received:
        for line in received:
            lines += [line] if line else []
            if len(lines) > LIVE_LINES or '"kind":"step"' in line:
                break
    return EngineTrace.parse("\n".join(lines) + "\n", client.url)
