"""`quire diff`: where a model departs from Hugging Face Transformers. Next to read: `../diff.py`."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from quire.cli.command import ExitCode, option, output_of, verb
from quire.cli.models import open_model
from quire.cli.options import environment_name
from quire.cli.terminal import Output
from quire.config import EngineOptions
from quire.lazy_torch import require_torch

if TYPE_CHECKING:
    from quire_workshop.diff import DiffRow

EXAMPLES = (
    "quire diff smollm2",
    'quire diff ./my-model --prompt "The capital of France is" --all',
    "quire diff ./my-model --bisect",
)
DEFAULT_PROMPT = "The capital of France is Paris, and the capital of Italy is"
NUM_SHOWN = 6


@verb("diff", EXAMPLES)
@click.argument("model", default=EngineOptions.model, envvar=environment_name("model"))
@option("--ref", type=click.Choice(["hf"]), default="hf", help="reference: hf, Hugging Face Transformers  [hf]")
@option("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="text that both compute  [a sentence]")
@option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    default=1e-3,
    help="largest error that passes, as a share of the reference's largest value  [0.001]",
)
@option("--all", "shows_all", is_flag=True, help="list every tensor")
@option("--bisect", is_flag=True, help="compute the plan with the kernels of each instruction set")
def diff_command(model: str, ref: str, prompt: str, tolerance: float, shows_all: bool, bisect: bool) -> None:
    """Compare a model with Transformers, tensor by tensor.

    Both compute PROMPT in fp32, and the outputs of modules of the same name are compared in the order of computation,
    then the logits, then the logits of the plan. Names the first tensor out of tolerance and the module that made it;
    the exit code is then 6.
    """
    from quire.engine.tokenizer_source import load_tokenizer
    from quire.weights.sources import resolve_source
    from quire_workshop.diff import bisect_kernels, compare_with_hf, first_departure

    require_torch("quire diff", extra="hf")
    output = output_of()
    options = EngineOptions(model=model)
    checkpoint = open_model(model, None, output)
    token_ids = load_tokenizer(checkpoint).encode(prompt)
    if not token_ids:
        raise click.UsageError("--prompt has no tokens: give at least one word")
    output.note(f"computing {len(token_ids)} tokens with Transformers and with Quire")
    rows = compare_with_hf(options, checkpoint, resolve_source(model).path, token_ids)
    first = first_departure(rows, tolerance)
    kernels = bisect_kernels(options, checkpoint, token_ids) if bisect else []
    if output.json:
        shown = {"rows": [asdict(row) for row in rows], "kernels": [asdict(row) for row in kernels]}
        named = None if first is None else first.name
        output.result_json("quire.diff/1", {"model": model, "tolerance": tolerance, "first": named, **shown})
    else:
        _print(rows, first, tolerance, shows_all, output)
        for row in kernels:
            verdict = "equals" if row.share <= tolerance else "DEPARTS from"
            output.result(f"the plan with {row.name} kernels {verdict} the model op by op: {row.share:.1e}")
    if first is not None or first_departure(kernels, tolerance) is not None:
        raise click.exceptions.Exit(ExitCode.CHECK_FAILED)


def _print(rows: "list[DiffRow]", first: "DiffRow | None", tolerance: float, shows_all: bool, output: Output) -> None:
    at = len(rows) if first is None else rows.index(first)
    shown = rows if shows_all else rows[-NUM_SHOWN:] if first is None else rows[max(0, at - 3) : at + 3]
    cells = [
        (
            row.name,
            "×".join(map(str, row.shape)),
            f"{row.max_error:.2e}",
            f"{row.share:.1e}",
            f"{row.cosine:.6f}",
            "✓" if row.share <= tolerance else "✗",
        )
        for row in shown
    ]
    output.table(["tensor", "shape", "max |Δ|", "of largest", "cosine", ""], cells, right=frozenset({2, 3, 4}))
    output.result()
    if first is None:
        worst = max(row.share for row in rows)
        output.result(
            f"{len(rows)} tensors equal within {tolerance:g} of their largest value; the worst is {worst:.1e}"
        )
        return
    before = f"; {rows[at - 1].name} before it is equal" if at else ""
    output.result(f"first tensor out of tolerance: {first.name}, made by {first.source}{before}")
    output.result(f"token {first.token}, channel {first.channel}: {first.ours:.6g} here, {first.reference:.6g} there")
