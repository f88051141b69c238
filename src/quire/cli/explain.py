"""`quire explain`: parameters, memory, FLOPs, bytes and times of a model, each number with its formula.

Next to read: `quire/insight/explain/explanation.py`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quire.cli.command import option, output_of, verb
from quire.cli.options import environment_name
from quire.cli.output import Output
from quire.cli.progress import show_progress
from quire.cli.values import LENGTH, LENGTHS
from quire.config import DTYPE_ALIASES, DTYPES, KV_DTYPES, QUANTIZED_BITS, EngineOptions

if TYPE_CHECKING:
    from quire.insight.explain.report import Report

EXAMPLES = (
    "quire explain smollm2 --batch 1,32 --ctx 512",
    "quire explain qwen3-4b --tp 2 --ctx 1024 --device H100-SXM --ops",
    "quire explain smollm2 --measure --html explained.html",
)
AUTO = "auto"


@verb("explain", EXAMPLES)
@click.argument("model", default=EngineOptions.model, envvar=environment_name("model"))
@option("--tp", "--tensor-parallel-size", "tp", type=click.IntRange(1, 1024), metavar="N", default=1,
        help="ranks that share each layer; figures are of one  [1]")  # fmt: skip
@option("--batch", type=LENGTHS, default=(1, 8, 32), help="streams that decode  [1,8,32]")
@option("--ctx", type=LENGTH, default=512, help="tokens of a prompt and of a context  [512]")
@option("--chunk", type=LENGTH, help="add a step: a prompt's chunk beside the decodes")
@option("--dtype", type=click.Choice((AUTO, *DTYPES, *DTYPE_ALIASES)), default=AUTO, help="compute type  [auto]")
@option("--kv-dtype", type=click.Choice((AUTO, *KV_DTYPES)), default=AUTO, help="KV cache type  [the compute type]")
@option("--quantization", type=click.Choice(tuple(QUANTIZED_BITS)), help="quantise the weights at load")
@option("--device", default=AUTO, metavar="NAME", help="cpu, cuda, or one by its data sheet: A100-80GB, …  [auto]")
@option("--ops", is_flag=True, help="list every operation of each phase")
@option("--html", type=click.Path(dir_okay=False, path_type=Path), help="write a page that needs no other file")
@option("--measure", is_flag=True, help="load the model, and show measured figures beside the predicted")
def explain_command(
    model: str, tp: int, batch: tuple[int, ...], ctx: int, chunk: int | None, dtype: str, kv_dtype: str,
    quantization: str | None, device: str, ops: bool, html: Path | None, measure: bool,
) -> None:  # fmt: skip
    """Explain a model's size, memory, work and time.

    MODEL is a model as for the other verbs, a config.json or a directory that holds only that, a hub id (only its
    config.json is fetched), or a preset: Qwen3-4B, Llama-2-7B, Llama-2-13B, Llama-3-8B, TinyLlama, DeepSeek-V3. Every
    number stands beside its formula and the values put in.
    """
    output = output_of()
    for name, value in (("--batch", min(batch, default=0)), ("--ctx", ctx), ("--chunk", chunk)):
        if value is not None and value < 1:
            raise click.UsageError(f"{name} {value} explains nothing: give 1 or more")
    from quire.insight.explain.explanation import Settings, explain
    from quire.insight.explain.subject import open_subject

    with show_progress(output) as progress:
        checkpoint = open_subject(model, progress)
    settings = Settings(tp, batch, ctx, chunk, dtype, kv_dtype, quantization, device)
    explained = explain(checkpoint, settings, with_ops=ops or output.json)
    report = explained.report
    if measure:
        from quire.insight.explain.measure import measure as measure_model

        output.note("measuring the model in this process")
        measure_model(explained, checkpoint, settings)
    if html is not None:
        from quire.insight.explain.page import to_html

        output.write_file("--html", html, to_html(report))
    if output.json:
        output.result_json("quire.explain/1", report.to_json())
    else:
        print_report(report, output)


def print_report(report: "Report", output: Output) -> None:
    """Print a report: per quantity its name, value, and formula with the values put in."""
    output.result(report.title)
    for note in report.notes:
        output.result(f"note: {note}")
    for section in report.sections:
        output.result(f"\n{section.title}")
        names = max((len(item.name) for item in section.quantities), default=0)
        values = max((len(item.shown) for item in section.quantities), default=0)
        for item in section.quantities:
            reason = f"  = {item.reason}" if item.reason else ""
            output.result(f"  {item.name:<{names}}  {item.shown:>{values}}{reason}")
        if section.rows:
            output.table(section.header, section.shown_rows(), right=section.right_columns)
        for note in section.notes:
            output.result(f"  {note}")
