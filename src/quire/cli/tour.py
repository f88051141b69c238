"""`quire tour`: one prompt through the real engine, stop by stop.

Next to read: `../insight/tour.py`.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from quire.cli.arguments import read_prompt, split_arguments
from quire.cli.command import option, output_of, verb
from quire.cli.options import OF_REPLICAS, chosen_options, option_flags
from quire.cli.output import Output
from quire.cli.show import open_model
from quire.config import EngineOptions
from quire.errors import PromptError, UnsupportedModelError
from quire.insight.tour_reasons import reason_of

if TYPE_CHECKING:
    from quire.insight.explain.rank_model import RankModel
    from quire.insight.tour import Stop, Tour
    from quire.weights.checkpoint import Checkpoint

EXAMPLES = ("quire tour", 'quire tour smollm2 "Why is the sky blue?" --all', "quire tour --tp 3 --json")
DEFAULT_PROMPT = "Why is the sky blue?"
FIXED = OF_REPLICAS | {
    "seed", "enable_prefix_caching", "multi_step_decode", "speculative", "tensor_parallel_size",
    "pipeline_parallel_size", "batch_invariant",
}  # fmt: skip
KEYS = "Enter: next line   w: why this line   n: next stop   q: quit"


@verb("tour", EXAMPLES)
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]")
@option("--max-tokens", type=click.IntRange(2, 512), default=8, metavar="N", help="tokens to generate  [8]")
@option("--chunk", type=click.IntRange(min=1), default=16, metavar="N",
        help="tokens per step of the chunked prefill  [16]")  # fmt: skip
@option("--tp", "--tensor-parallel-size", "tp", type=click.IntRange(2, 1024), metavar="N",
        help="add a stop: the shapes on one of N ranks")  # fmt: skip
@option("--all", "shows_all", is_flag=True, help="print every stop and its why, without waiting for keys")
@option_flags(EngineOptions, without=FIXED, defaults={"device": "cpu"})
def tour_command(
    words: tuple[str, ...], max_tokens: int, chunk: int, tp: int | None, shows_all: bool, **values: Any
) -> None:
    """Follow one prompt through the engine, step by step.

    The model answers PROMPT in this process: tokens, KV blocks, prefill, chunked prefill, decode, the shape of each
    matrix product, and the same without a KV cache. On a terminal it waits after each line: Enter goes on, w tells why,
    n goes to the next stop, q ends. Without a PROMPT it asks why the sky is blue.
    """
    output, engine_values = output_of(), chosen_options(values, EngineOptions)
    arguments = split_arguments(words, engine_values, what="prompt")
    text = DEFAULT_PROMPT if arguments.text is None else read_prompt(arguments.text, missing="no prompt was given")
    if not text or not text.strip():
        raise PromptError("the prompt is empty: give at least one word")
    stops = _stops({**engine_values, "model": arguments.model}, text, max_tokens, chunk, tp, output)
    if output.json:
        shown = [asdict(stop) | {"whys": [reason_of(line) for line in stop.lines]} for stop in stops]
        output.result_json("quire.tour/1", {"model": arguments.model, "prompt": text, "stops": shown})
    elif shows_all or not (sys.stdin.isatty() and sys.stdout.isatty()):
        for number, stop in enumerate(stops, 1):
            _print_title(number, stop, output)
            for line in stop.lines:
                output.result(f"   {line}")
            _print_why(stop, output)
    else:
        step_through(stops, output)


def _stops(
    engine_values: dict[str, Any], text: str, max_tokens: int, chunk: int, tp: int | None, output: Output
) -> Iterator["Stop"]:
    """Load the model, then yield each stop when it is asked for."""
    from quire.cli.session import NO_TEMPLATE
    from quire.engine.tokenizer_source import load_tokenizer, read_chat_template
    from quire.text.dialogue import Dialogue

    options = EngineOptions(
        **{"device": "cpu", **engine_values},
        enable_prefix_caching=False,
        multi_step_decode=1,
        speculative="off",
        batch_invariant=True,
    )
    checkpoint = open_model(options.model, options.revision, output)
    from quire.insight.compare.rig import load
    from quire.insight.explain.rank_model import trace_rank
    from quire.insight.tour import Tour, rank_stop

    output.note(f"loading {options.model}")
    config, executor = load(options, checkpoint)
    tokenizer = load_tokenizer(checkpoint, options.tokenizer, config.model.vocab_size)
    template = read_chat_template(options.chat_template)
    if template is None and not tokenizer.chat_templates:
        output.note(NO_TEMPLATE)
        token_ids = tokenizer.encode(text)
    else:
        dialogue = Dialogue(tokenizer.chat_templates, tokenizer, template)
        token_ids = dialogue.prepare([{"role": "user", "content": text}]).token_ids
    roles: RankModel | None = None
    try:
        roles = trace_rank(config, checkpoint, 1)
    except UnsupportedModelError as error:
        output.detail(f"weights have no names in this tour: {error}")
    rank = None if tp is None else trace_rank(config, checkpoint, tp)  # a bad --tp is an error before the first stop
    tour = Tour(config, executor, tokenizer, token_ids, num_tokens=max_tokens, chunk=chunk, roles=roles)
    yield from tour.stops()
    if rank is not None and tp is not None:
        yield rank_stop(rank, tp, len(token_ids))
    yield _gpu_stop(tour, options, checkpoint)


def _gpu_stop(tour: "Tour", options: EngineOptions, checkpoint: "Checkpoint") -> "Stop":
    from quire.insight.compare.rig import load
    from quire.insight.tour import Stop
    from quire.lazy_torch import torch
    from quire.runtime.hardware import has_gpu_driver

    if options.device != "cpu":
        return Stop("CPU and GPU", [f"this tour ran on {options.device}: --device cpu compares the two"], "")
    if not has_gpu_driver() or not torch.cuda.is_available():
        return Stop("CPU and GPU", ["this machine has no CUDA GPU to run the same prompt on"], "")
    config, executor = load(replace(options, device="cuda"), checkpoint)
    return tour.beside(torch.cuda.get_device_name(), config, executor)


def step_through(stops: Iterator["Stop"], output: Output) -> None:
    """Wait for a key after each line."""
    output.note(KEYS)
    for number, stop in enumerate(stops, 1):
        _print_title(number, stop, output)
        key = ""
        for line in stop.lines:
            output.result(f"   {line}")
            while key != "n" and (key := _key()) not in ("\r", "\n", "n"):
                if key == "q":
                    return
                if key == "w":
                    output.result(f"   why: {reason_of(line) or stop.why}")
        _print_why(stop, output)


def _key() -> str:
    try:
        return click.getchar().lower()
    except EOFError:  # Ctrl-D
        return "q"


def _print_title(number: int, stop: "Stop", output: Output) -> None:
    output.result(output.style(f"{number}. {stop.title}", "bold", sys.stdout))


def _print_why(stop: "Stop", output: Output) -> None:
    output.result(f"   why: {stop.why}\n" if stop.why else "")
