"""`quire view`: draws one step of a recording or of a running server. Next to read: `../insight/view.py`."""

from contextlib import closing
from typing import TYPE_CHECKING

import click

from quire.cli.command import option, output_of, verb
from quire.cli.server_client import ServerClient, find_url, url_option

if TYPE_CHECKING:
    from quire.insight.trace import Trace

WHAT = ("mask", "blocks", "step", "ops")
LIVE_LINES = 2000
EXAMPLES = (
    "quire view blocks sky.jsonl",
    "quire view mask sky.jsonl --step 1 --svg mask.svg",
    "quire view step --url http://127.0.0.1:8000",
)


@verb("view", EXAMPLES)
@click.argument("what", type=click.Choice(WHAT), metavar="WHAT")
@click.argument("recording", required=False)
@option("--step", type=int, metavar="N", help="number of the step  [the newest]")
@option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="write an SVG file")
@option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="write an HTML file")
@url_option
def view_command(
    what: str, recording: str | None, step: int | None, svg: str | None, html: str | None, url: str | None
) -> None:
    """Draw one step: its attention mask, the KV blocks, its place among the last steps, or its instructions.

    WHAT is mask, blocks, step or ops. The step is the newest one of RECORDING (see `quire trace`), unless --step names
    another; without a RECORDING it is the next one of a running server. --svg and --html write a file instead of text.
    """
    from quire.insight.picture import to_html
    from quire.insight.trace import Trace
    from quire.insight.view import VIEWS

    output = output_of()
    if not recording:
        output.note("waiting for the server's next step")
    trace = Trace.read(recording) if recording else _fetch(url)
    if trace.is_cut:
        output.note(f"{recording}: the last line is incomplete and was left out", style="yellow")
    chosen = trace.step(step)
    picture = VIEWS[what](trace, chosen)
    drawn = picture.to_svg() if svg or html else ""
    for name, path, text in (("--svg", svg, drawn), ("--html", html, to_html(picture.title, [drawn]))):
        if path:
            output.write_file(name, path, text)
    if output.json:
        cells = [{"label": row.label, "cells": list(row.cells), "remark": row.remark} for row in picture.rows]
        told = {"caption": picture.caption, "formula": picture.formula, "source": picture.source}
        output.result_json("quire.view/1", {"what": what, "step": chosen["step_id"], **told, "rows": cells})
    elif not svg and not html:
        output.result(picture.to_text())


def _fetch(url: str | None) -> "Trace":
    """Watch a server until it has computed a step."""
    from quire.insight.trace import Trace

    lines: list[str] = []
    with ServerClient(find_url(url)) as client, closing(client.event_lines("/xray/events?op_period=1")) as received:
        for line in received:
            lines += [line] if line else []
            if len(lines) > LIVE_LINES or '"kind":"step"' in line:
                break
    return Trace.parse("\n".join(lines) + "\n", client.url)
