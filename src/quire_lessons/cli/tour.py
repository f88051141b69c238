"""`quire tour`: one prompt through the real engine, stop by stop.

Next to read: `../tour.py`.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.cli.command import lang_option, option, output_of, verb
from quire.cli.options import OF_SERVE, chosen_options, option_flags, read_prompt, split_arguments
from quire.cli.terminal import END, Output, ReadKey, is_capable_terminal, open_file, show_progress, typed_keys
from quire.config import EngineConfig, EngineOptions
from quire.errors import PromptError
from quire_lessons.tour_reasons import reason_of

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer
    from quire.weights.checkpoint import Checkpoint
    from quire_lessons.tour import Tour, TourStop

EXAMPLES = (
    "quire tour",
    'quire tour smollm2 "Why is the sky blue?" --all',
    "quire tour qwen3-4b --num-layers 1 --tp 2 --prompt-len 128 --max-tokens 11 --chunk 32",
)
DEFAULT_PROMPT = "Why is the sky blue?"
FIXED = OF_SERVE | {
    "seed", "enable_prefix_caching", "multi_step_decode", "speculative", "tensor_parallel_size",
    "pipeline_parallel_size", "batch_invariant",
}  # fmt: skip
KEYS = "Enter: next line   w: why this line   n: next stop   q: quit"


@verb("tour", EXAMPLES)
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]")
@option("--max-tokens", type=click.IntRange(2, 512), default=8, metavar="N", help="tokens to generate  [8]")
@option(
    "--prompt-len", type=click.IntRange(min=1), metavar="N", help="repeat or cut the prompt to N tokens  [as it is]"
)
@option(
    "--chunk", type=click.IntRange(min=1), default=16, metavar="N", help="tokens per step of the chunked prefill  [16]"
)
@option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    type=click.IntRange(1, 1024),
    default=1,
    metavar="N",
    help="run on N ranks, each a process with its share of the model  [1]",
)
@option(
    "--num-layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="keep only the first N layers, with random weights  [all]",
)
@option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="write a page that plays the prompt, its answer and a fork of it in 20 seconds, offline",
)
@option("--all", "shows_all", is_flag=True, help="print every stop and its why, without waiting for keys")
@lang_option
@option_flags(EngineOptions, without=FIXED, defaults={"device": "cpu"})
def tour_command(
    words: tuple[str, ...],
    max_tokens: int,
    prompt_len: int | None,
    chunk: int,
    tp: int,
    num_layers: int | None,
    html: Path | None,
    shows_all: bool,
    translate: Callable[[str], str],
    **values: Any,
) -> None:
    """Follow one prompt through the engine, step by step.

    The model answers PROMPT in this process: tokens, KV blocks, prefill, chunked prefill, decode, each operation with
    its shape, work and time, and the same without a KV cache. On a terminal it waits after each line: Enter goes on, w
    tells why, n goes to the next stop, q ends. Without a PROMPT it asks why the sky is blue.

    MODEL is any that `quire explain` takes: a config.json alone, or the name of a published shape such as Qwen3-4B.
    Then the weights are random, and the tokenizer is that of SmolLM2 where the model has none.
    """
    output, engine_values = output_of(), chosen_options(values, EngineOptions)
    arguments = split_arguments(words, engine_values, what="prompt")
    text = DEFAULT_PROMPT if arguments.text is None else read_prompt(arguments.text, missing="no prompt was given")
    if not text or not text.strip():
        raise PromptError("the prompt is empty: give at least one word")
    if html is not None:
        if num_layers is not None or prompt_len is not None:
            raise click.UsageError(
                "--html plays the model and the prompt as they are: leave out --num-layers and --prompt-len"
            )
        _write_story(
            html, text, {"device": "cpu", **engine_values, "model": arguments.model, "tensor_parallel_size": tp}, output
        )
        return
    options = EngineOptions(
        **{"device": "cpu", **engine_values, "model": arguments.model},
        enable_prefix_caching=False,
        multi_step_decode=1,
        speculative="off",
        batch_invariant=True,
        tensor_parallel_size=tp,
    )
    told = Told(output, translate)
    stops = _stops(options, text, max_tokens, prompt_len, chunk, num_layers, told)
    if output.json:
        shown = [asdict(stop) | {"whys": [reason_of(line) for line in stop.lines]} for stop in stops]
        output.result_json("quire.tour/1", {"model": arguments.model, "prompt": text, "stops": shown})
    elif shows_all or not (sys.stdin.isatty() and sys.stdout.isatty()):
        for number, stop in enumerate(stops, 1):
            told.title(number, stop)
            for line in stop.lines:
                told.line(line)
            told.why(stop)
    else:
        step_through(stops, told)


def _write_story(file: Path, text: str, values: dict[str, Any], output: Output) -> None:
    """Record the story of a prompt and write the page that plays it. Raises: ConfigError if it cannot be written."""
    from quire.cli.run import open_engine
    from quire.engine.chat import dialogue_of
    from quire.insight.trace import to_html
    from quire_lessons.story import OPTIONS, record_story

    with open_file("--html", file) as opened:
        with open_engine(EngineOptions.from_kwargs(**{**OPTIONS, **values}), output) as engine:
            trace = record_story(engine, dialogue_of(engine).message_ids(text))
        opened.write(to_html(trace).encode())
    output.note(f"wrote {file}: open it in a browser")


def _stops(
    options: EngineOptions,
    text: str,
    max_tokens: int,
    prompt_len: int | None,
    chunk: int,
    num_layers: int | None,
    told: "Told",
) -> Iterator["TourStop"]:
    """Load the model, then yield each stop when it is asked for."""
    from quire_lessons.compare.rig import load
    from quire_lessons.tour import Tour, check_length
    from quire_lessons.tour_subject import open_model
    from quire_lessons.tour_work import StepWork

    with show_progress(told.output) as progress:
        options, checkpoint = open_model(options, num_layers, progress)
    told.note(f"loading {options.model}" + ", with random weights" * (not checkpoint.tensors))
    config, executor = load(options, checkpoint)
    try:
        check_length(config, (prompt_len or 0) + max_tokens)
        tokenizer, token_ids = _prompt_ids(config, checkpoint, text, prompt_len, told)
        work = StepWork.measure(config, checkpoint)
        if work is None:
            told.note("this model cannot be traced: the stops have no FLOPs and bytes")
        tour = Tour(config, executor, tokenizer, token_ids, num_tokens=max_tokens, chunk=chunk, work=work)
        yield from tour.stops()
        yield _gpu_stop(tour, options, checkpoint)
    finally:
        executor.shutdown()


def _prompt_ids(
    config: EngineConfig, checkpoint: "Checkpoint", text: str, length: int | None, told: "Told"
) -> tuple["Tokenizer", list[int]]:
    """Return the tokenizer and the prompt's token ids, repeated or cut to `length`."""
    from quire.cli.run import NO_TEMPLATE
    from quire.engine.tokenizer_source import read_chat_template
    from quire.text.dialogue import Dialogue
    from quire_lessons.tour_subject import LENDER, open_tokenizer

    vocab_size = config.model.vocab_size
    with show_progress(told.output) as progress:
        tokenizer, is_borrowed = open_tokenizer(config.options, checkpoint, vocab_size, progress)
    if is_borrowed:
        rest = f"; its ids are taken modulo {vocab_size}" if vocab_size < tokenizer.vocab_size else ""
        told.note(f"{config.options.model} has no tokenizer, and borrows that of {LENDER}{rest}")
    dialogue = Dialogue(tokenizer.chat_templates, tokenizer, read_chat_template(config.options.chat_template))
    if not dialogue.has_template:
        told.output.note(NO_TEMPLATE)
    token_ids = dialogue.message_ids(text)
    if is_borrowed:
        token_ids = [token_id % vocab_size for token_id in token_ids]
    if length is not None:
        token_ids = (token_ids * -(-length // len(token_ids)))[:length]
    return tokenizer, token_ids


def _gpu_stop(tour: "Tour", options: EngineOptions, checkpoint: "Checkpoint") -> "TourStop":
    from quire.byte_sizes import format_bytes
    from quire.lazy_torch import torch
    from quire.runtime.hardware import has_gpu_driver
    from quire_lessons.compare.rig import load
    from quire_lessons.tour import TourStop
    from quire_lessons.tour_work import StepWork

    if options.device != "cpu":
        return TourStop("CPU and GPU", [f"this tour ran on {options.device}: --device cpu compares the two"], "")
    if not has_gpu_driver() or not torch.cuda.is_available():
        return TourStop("CPU and GPU", ["this machine has no CUDA GPU to run the same prompt on"], "")
    if torch.cuda.device_count() < options.tensor_parallel_size:
        found, wanted = torch.cuda.device_count(), options.tensor_parallel_size
        return TourStop("CPU and GPU", [f"{wanted} ranks need {wanted} GPUs, there are {found}: --tp {found} fits"], "")

    def memory() -> str:
        held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return f"{format_bytes(held)} allocated, {format_bytes(reserved)} reserved by PyTorch"

    config, executor = load(replace(options, device="cuda"), checkpoint)
    try:
        work = StepWork.measure(config, checkpoint)
        return tour.beside(torch.cuda.get_device_name(), config, executor, work, memory)
    finally:
        executor.shutdown()


class Told:
    """Lines of the tour in the chosen language. `translate`: English to it."""

    def __init__(self, output: Output, translate: Callable[[str], str]) -> None:
        self.output, self._translate = output, translate

    def note(self, text: str) -> None:
        """Write a note to stderr."""
        self.output.note(self._translate(text))

    @contextlib.contextmanager
    def legend(self, unknown: str) -> Iterator[None]:
        """Show what keys do below the lines of the tour; on a terminal that can, only meanwhile."""
        text = self._translate(f"{unknown} does nothing here") + "   " if unknown else ""
        text += self._translate(KEYS)
        if not is_capable_terminal(sys.stderr):
            self.output.note(text)
            yield
            return
        self.output.aside(text)
        try:
            yield
        finally:
            self.output.clear_line()

    def title(self, number: int, stop: "TourStop") -> None:
        """Write a stop's title."""
        self.output.result(f"{number}. {self._translate(stop.title)}", style="bold")

    def line(self, text: str) -> None:
        """Write a line of a stop."""
        self.output.result(f"   {self._translate(text)}")

    def why(self, stop: "TourStop", line: str = "") -> None:
        """Write the reason of a stop, or of its `line`, if it has one of its own."""
        if line:
            self.line(f"why: {reason_of(line) or stop.why}")
        else:
            self.output.result(self._translate(f"   why: {stop.why}") + "\n" if stop.why else "")


def step_through(stops: Iterator["TourStop"], told: Told) -> None:
    """Wait for a key after each line; under it stands what the keys do."""
    with typed_keys() as read_key:
        for number, stop in enumerate(stops, 1):
            told.title(number, stop)
            key = ""
            for line in stop.lines:
                told.line(line)
                while key != "n" and (key := _next_key(read_key, told)) not in ("\n", "n"):
                    if key in ("q", END):
                        return
                    told.why(stop, line)
            told.why(stop)


def _next_key(read_key: ReadKey, told: Told) -> str:
    """Return the next key that does something; say of others that they do not."""
    unknown = ""
    while True:
        with told.legend(unknown):
            key = read_key(None) or END
        if key in ("\n", "w", "n", "q", END):
            return key
        unknown = key if key.isprintable() and key != " " else "that key"
