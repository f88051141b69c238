"""`quire explain`: parameters, memory, FLOPs, bytes and times of a model, each number with its formula; `quire view`:
a picture of one step of a recording or of a running server, or of a layer of a model.

Next to read: `../insight/explain/explanation.py`, `../insight/view.py`.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.command import is_english, lang_option, option, output_of, verb
from quire.cli.options import LENGTH, LENGTHS, Value, environment_name
from quire.cli.server_client import ServerClient, find_url, url_option
from quire.cli.terminal import Output, padded, show_progress
from quire.config import DTYPE_ALIASES, DTYPES, KV_DTYPES, QUANTIZED_BITS, EngineOptions
from quire.text.width import display_width

if TYPE_CHECKING:
    from quire.insight.explain.report import Report
    from quire.insight.picture import Picture
    from quire.insight.trace import EngineTrace

# --- `quire explain` ------------------------------------------------------------------------------

EXPLAIN_EXAMPLES = (
    "quire explain smollm2 --batch 1,32 --ctx 512",
    "quire explain qwen3-4b --tp 2 --ctx 1024 --device H100-SXM --ops",
    "quire explain tinyllama --device RTX-4090 --gpu-memory-utilization 0.9,0.3 --kv-dtype auto,int8",
    "quire explain smollm2 --lora 16 --batch 8",
    "quire explain smollm2 --measure --html explained.html",
)
AUTO = "auto"
DEFAULT_CTX = 512
POSITIVE = ("chunk", "max_num_seqs", "max_num_batched_tokens", "block_size")


def _parse_shares(text: str) -> tuple[float, ...]:
    shares = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    if not all(0 < share <= 1 for share in shares):
        raise ValueError(text)
    return shares


def _parse_kv_types(text: str) -> tuple[str, ...]:
    types = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not set(types) <= {AUTO, "fp8", *KV_DTYPES}:
        raise ValueError(text)
    return types


SHARES = Value("share,…", _parse_shares, "a list of shares above 0, at most 1, such as 0.9,0.3")
KV_TYPES = Value("type,…", _parse_kv_types, f"a list of auto, fp8, {', '.join(KV_DTYPES)}")


@verb("explain", EXPLAIN_EXAMPLES)
@click.argument("model", default=EngineOptions.model, envvar=environment_name("model"))
@option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    type=click.IntRange(1, 1024),
    metavar="N",
    default=1,
    help="ranks that share each layer; figures are of one  [1]",
)
@option("--batch", type=LENGTHS, default=(1, 8, 32), help="streams that decode  [1,8,32]")
@option("--ctx", type=LENGTH, help="tokens of a prompt and of a context  [512]")
@option("--chunk", type=LENGTH, help="compute the prompt in chunks, and add a step: a chunk beside the decodes")
@option("--dtype", type=click.Choice((AUTO, *DTYPES, *DTYPE_ALIASES)), default=AUTO, help="compute type  [auto]")
@option("--kv-dtype", type=KV_TYPES, default=(AUTO,), help="KV cache type, for any device  [the compute type]")
@option("--quantization", type=click.Choice(tuple(QUANTIZED_BITS)), help="quantise the weights at load")
@option(
    "--device",
    default=AUTO,
    metavar="NAME|FILE",
    help="cpu, cuda, a known one such as A100-80GB, or a JSON file with its data sheet  [auto]",
)
@option(
    "--gpu-memory-utilization",
    type=SHARES,
    default=(EngineOptions.gpu_memory_utilization,),
    help="share of a GPU's memory used in all  [0.9]",
)
@option("--max-num-seqs", type=LENGTHS, default=(), help="sequences running at once  [the largest batch]")
@option("--max-model-len", type=LENGTHS, default=(), help="length of the requests that must fit  [--ctx]")
@option("--max-num-batched-tokens", type=LENGTH, help="token budget of one step  [2048]")
@option("--block-size", type=LENGTH, help="tokens per KV block  [16, on a CPU 32]")
@option(
    "--lora",
    multiple=True,
    metavar="NAME=PATH|RANK",
    help="show bytes and work of an adapter, or of any one of a rank; may be given several times",
)
@option("--ops", is_flag=True, help="list every operation of each phase")
@option("--html", type=click.Path(dir_okay=False, path_type=Path), help="write a page that needs no other file")
@option("--measure", is_flag=True, help="load the model, and show measured figures beside the predicted")
@lang_option
def explain_command(
    model: str,
    ctx: int | None,
    ops: bool,
    html: Path | None,
    measure: bool,
    max_model_len: tuple[int, ...],
    translate: Callable[[str], str],
    **values: Any,
) -> None:
    """Explain a model's size, memory, work and time.

    MODEL is a model as for the other verbs, a config.json or a directory that holds only that, a hub id (only its
    config.json is fetched), or a preset: Qwen3-4B, Qwen3-30B-A3B, Llama-2-7B, Llama-2-13B, Llama-2-70B, Llama-3-8B,
    TinyLlama, DeepSeek-V3, GPT-2, gpt-oss-20b, Gemma-3-4B. Every number stands beside its formula and the values put
    in. Of --kv-dtype, --gpu-memory-utilization, --max-num-seqs and --max-model-len, several values separated by commas
    are compared: the first one is explained, and a table shows what fits with each combination.
    """
    output = output_of()
    ctx = min(DEFAULT_CTX, *max_model_len[:1]) if ctx is None and max_model_len else DEFAULT_CTX if ctx is None else ctx
    lengths = {"--ctx": (ctx,), "--batch": values["batch"] or (0,), "--max-model-len": max_model_len}
    lengths |= {
        f"--{name.replace('_', '-')}": value if isinstance(value, tuple) else (value,)
        for name, value in values.items()
        if name in POSITIVE and value is not None
    }
    for name, found in lengths.items():
        if min(found, default=1) < 1:
            raise click.UsageError(f"{name} {min(found)} explains nothing: give 1 or more")
    from quire.insight.explain.explanation import explain
    from quire.insight.explain.subject import Settings, open_subject

    with show_progress(output) as progress:
        checkpoint = open_subject(model, progress)
    settings = Settings(batches=values.pop("batch"), ctx=ctx, max_model_len=max_model_len, **values)
    explained = explain(checkpoint, settings, with_ops=ops or output.json)
    report = explained.report
    if measure:
        from quire.insight.explain.measure import measure as measure_model

        output.note(translate("measuring the model in this process"))
        measure_model(explained, checkpoint, settings)
    if html is not None:
        from quire.insight.explain.report import to_html

        page = to_html(report)
        if not is_english(translate):
            from quire.insight.chinese import html_to_chinese

            page = html_to_chinese(page)
        output.write_file("--html", html, page)
    if output.json:
        output.result_json("quire.explain/1", report.to_json())
    else:
        print_report(report, output, translate)


def print_report(report: "Report", output: Output, translate: Callable[[str], str] = str) -> None:
    """Print a report: per quantity its name, value, and formula with the values put in."""
    output.result(translate(report.title))
    for note in report.notes:
        output.result(translate(f"note: {note}"))
    for section in report.sections:
        output.result(f"\n{translate(section.title)}")
        cells = [(translate(item.name), translate(item.shown)) for item in section.quantities]
        widths = [max(map(display_width, column)) for column in zip(*cells, strict=True)]
        for item, cell in zip(section.quantities, cells, strict=True):
            formula = " = ".join(translate(part) for part in (item.formula, item.values) if part)
            shown = "  ".join(padded(cell, widths, {1}))
            output.result(f"  {shown}{'  = ' if formula else ''}{formula}")
        if section.rows:
            rows = [[translate(cell) for cell in row] for row in section.shown_rows()]
            output.table([translate(cell) for cell in section.header], rows, right=section.right_columns)
        for note in section.notes:
            output.result(f"  {translate(note)}")


# --- `quire view` ---------------------------------------------------------------------------------

OF_STEPS = ("mask", "blocks", "step", "ops")
OF_MODELS = ("layer", "ranks")
LIVE_LINES = 2000
VIEW_EXAMPLES = (
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


@verb("view", VIEW_EXAMPLES)
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
    from quire.insight.explain.subject import Settings, open_subject
    from quire.insight.view_model import view_layer, view_ranks

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
