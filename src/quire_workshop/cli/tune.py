"""`quire tune`: measure which settings are the fastest for a model here, and keep them. Next to read: `../tuner.py`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import msgspec

from quire.byte_sizes import format_bytes
from quire.cli.command import option, output_of, verb
from quire.cli.models import open_model
from quire.cli.options import chosen_options, option_flags
from quire.cli.terminal import Output
from quire.config import EngineOptions

if TYPE_CHECKING:
    from quire_workshop.tuner import Tuned

CHOICES = frozenset({"dtype", "quantization", "kv_cache_dtype", "revision", "max_model_len"})
"""Options that decide what is measured; a tuning holds for the same choice only."""


@verb("tune", ("quire tune", "quire tune ./model.gguf --rounds 15", "quire tune --clear"))
@click.argument("model", required=False)
@option(
    "--rounds",
    type=click.IntRange(7, 100),
    default=7,
    metavar="N",
    help="measurements of each setting; fewer than 7 cannot tell a gain from noise  [7]",
)
@option("--clear", is_flag=True, help="forget what was found for the model, and measure nothing")
@option_flags(EngineOptions, without=frozenset(EngineOptions.__dataclass_fields__) - CHOICES)
def tune_command(model: str | None, rounds: int, clear: bool, **values: Any) -> None:
    """Find the fastest settings of a model on this machine, and keep them.

    Measures the number of threads, the KV that products fetch for the next attention, and with AMX the step length from
    which bf16 tiles are used, beside the defaults and by turns. What is faster by more than the noise is kept in the
    cache directory; later starts use it, and the start line and `quire doctor` say so. Block sizes and numbers of
    streams are measured and advised, not set. Other work on the machine spoils the result.
    """
    from quire.runtime.hardware import detect_hardware
    from quire.runtime.tuning import keep_tuning

    output = output_of()
    options = EngineOptions.from_kwargs(model, **chosen_options(values, EngineOptions))
    checkpoint = open_model(options.model, options.revision, output)
    hardware = detect_hardware("cpu")
    if clear:
        keep_tuning(None, hardware, options, checkpoint)
        output.result(f"{options.model}: the defaults hold again")
        return
    from quire_workshop.tuner import Tuner  # imports the engine

    tuned = Tuner(options, lambda what: output.note(f"measuring {what}"), rounds).run()
    is_kept = keep_tuning(tuned.tuning, hardware, options, checkpoint)
    if output.json:
        shown = {"tuning": msgspec.to_builtins(tuned.tuning), "is_kept": is_kept, "advice": asdict(tuned.advice)}
        output.result_json("quire.tune/1", {"model": options.model, **shown, "ratios": list(map(asdict, tuned.ratios))})
        return
    _print(tuned, output)
    if tuned.tuning is None:
        output.result("the defaults are the fastest here")
    elif is_kept:
        output.result(f"kept: {tuned.tuning.found}   undo: quire tune --clear")
    else:
        output.result(f"found, but not kept (the cache directory cannot be written): {tuned.tuning.found}")


def _print(tuned: "Tuned", output: Output) -> None:
    advice = tuned.advice
    cells = [
        (
            ratio.setting,
            f"{ratio.median:.3f} ×",
            f"{ratio.low:.3f} to {ratio.high:.3f}",
            "faster" if ratio.is_faster else "",
        )
        for ratio in (*tuned.ratios, *advice.block_sizes)
    ]
    output.table(["setting", "of the default", "99 % bounds", ""], cells, right=frozenset({1, 2}))
    output.result()
    output.table(
        ["streams", "tokens/s"],
        [(str(number), f"{speed:.0f}") for number, speed in advice.curve],
        right=frozenset({0, 1}),
    )
    output.result()
    output.result(
        f"--max-num-seqs {advice.num_streams} reaches nearly the highest throughput; full contexts of so many take"
        f" {format_bytes(advice.kv_bytes)} of KV (--kv-cache-memory-bytes)"
    )
    for ratio in advice.block_sizes:
        if ratio.is_faster:
            output.result(f"--block-size {ratio.setting.split()[2]} is {ratio.median:.2f} × as fast")
