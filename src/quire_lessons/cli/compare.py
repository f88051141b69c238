"""`quire compare`: the same requests through the same engine with one thing switched; a table, JSON, charts or a page.

Next to read: `../compare/__init__.py`.
"""

from dataclasses import asdict
from typing import Any

import click

from quire.cli.command import option, output_of, verb
from quire.cli.options import BYTES, EVERY_LENGTH, LENGTH

EXAMPLES = (
    "quire compare batching",
    "quire compare kv --pool 128MiB --html kv.html",
    "quire compare batching --prompt-len 100,200,300 --output-len 1",
    "quire compare ladder --html ladder.html",
    "quire compare speculation",
    "quire compare adapters --rank 16",
    "quire compare cache --prompt-len 1 --output-len 10,100,1000",
    "quire compare batching --model smollm2 --slots 4",
)
COMPARISONS = ("cache", "batching", "kv", "ladder", "speculation", "adapters", "attention")


@verb("compare", EXAMPLES)
@click.argument("name", type=click.Choice(COMPARISONS))
@option(
    "--model",
    metavar="TEXT",
    help="model to run, or fake: no model, a step takes one unit of time  [cache, ladder, speculation, adapters: "
    "smollm2; batching, kv: fake; attention: the shape of Llama-2-7B]",
)
@option("--seed", type=int, default=0, help="seed of the workload  [0]")
@option("--requests", type=LENGTH, help="requests of the workload")
@option("--slots", type=LENGTH, default=8, help="batching: largest batch  [8]")
@option("--rate", type=float, help="batching, kv: requests that arrive per step, or per second with a model")
@option("--pool", type=BYTES, help="kv: size of the KV cache  [256MiB for 2048 tokens]")
@option(
    "--prompt-len",
    "prompt_lens",
    type=EVERY_LENGTH,
    default=(),
    help="prompt tokens of each request, from the first again if there are more  [drawn; cache: 16]",
)
@option(
    "--output-len",
    "output_lens",
    type=EVERY_LENGTH,
    default=(),
    help="output tokens of each request; cache: of each run  [drawn]",
)
@option("--context", type=LENGTH, help="longest sequence, prompt and output together")
@option("--rank", type=LENGTH, help="adapters: rank of the random adapters  [16]")
@option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="write the charts to an SVG file")
@option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="write a page with charts to a file")
def compare_command(name: str, pool: int | None, svg: str | None, html: str | None, **values: Any) -> None:
    """Compare ways to cache, batch and allocate on one engine.

    The same requests run with one thing switched. cache: no KV cache, KV cache. batching: static, dynamic, continuous.
    kv: contiguous, buddy, paged memory. ladder: all of these and more, one on top of the other, in about 3 minutes.
    speculation: off, drafts. adapters: the base, one adapter, one per request. attention: MHA, GQA, MQA, MLA, sliding
    window.
    """
    from quire_lessons.compare import run
    from quire_lessons.compare.results import RunSettings, equal_text, html_page, row_texts, svg_image

    output, stages = output_of(), set[str]()

    def show(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages.add(stage)
            output.note(f"{name}: {stage}")

    comparison = run(name, RunSettings(pool_bytes=pool, **values), show)
    for option_name, path, draw in (("--svg", svg, svg_image), ("--html", html, html_page)):
        if path is not None:
            output.write_file(option_name, path, draw(comparison))
    if output.json:
        output.result_json("quire.compare/1", asdict(comparison))
        return
    output.result(comparison.title)
    if comparison.outputs_equal is not None:
        output.result(equal_text(comparison))
    output.result()
    header = [name for name, _ in comparison.columns]
    rows = [row_texts(comparison, row) for row in comparison.rows]
    output.table(header, rows, right=frozenset(range(1, len(header))))
    output.result()
    for sentence in comparison.explanation:
        output.result(sentence)
