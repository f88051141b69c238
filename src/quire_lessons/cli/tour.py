"""`quire tour`: one prompt through the real engine, stop by stop.

Next to read: `../tour.py`.
"""

import contextlib
import re
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
    from quire_lessons.tour_work import StepWork, open_model

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
    from quire_lessons.tour_work import LENDER, open_tokenizer

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


# --- The answer to "why?" at each line ------------------------------------------------------------

# A pattern of a line's beginning, then the reason.
_REASONS = r"""
\d+ tokens, each
    The model's vocabulary is fixed. A frequent word is one token; a rare word is several.
\d+: \d+ '|…
    A leading space belongs to the token. Words like <|im_start|> are special tokens that only the chat template
    writes: text of a user cannot contain them.
blocks =
    Blocks are given whole. Rounding up wastes less than one block per sequence, and any free block fits.
block table
    The table is all that ties the sequence to its memory. Block 0 is kept for entries without tokens, so tables
    begin at 1.
slot of position
    The kernel that writes keys and values, and attention, compute addresses by this formula.
KV cache:
    Each layer keeps its own key and value of each token. Grouped-query attention has fewer KV heads than query
    heads, which divides this number.
step \d+: positions .* in one batch
    T is the number of rows in every matrix product of the step. All layers run in one native call.
mask:
    A token may not see later ones: in training they are what it must predict. The other half of the square is
    never computed.
layers with a sliding window
    Such layers forget: keys older than the window are not read, and their blocks become free.
no instruction was timed
    Only a plan's instructions have times. Op by op, use `quire trace --torch-profiler`.
\d+ instructions take
    Gemm is a matrix product. Its share is large in every step, since nearly all weights are in products.
pool:
    All requests take blocks from one pool. A request that finds none waits, or another gives its blocks back.
query_start_loc|in the last step query_start_loc
    The batch is one flat row of tokens without padding: request r has the rows from query_start_loc[r] on, and
    attends to seq_lens[r] positions.
block_tables|in the last step block_tables
    Kernels read keys and values through the block tables and write new ones to the slots of slot_mapping.
(in total: (\d+ steps, )?)?\d+ tokens in
    The time of whole steps as the engine's event log has it, with scheduling and sampling.
(in total: )?[\d.]+ .?FLOP.* moved
    FLOPs divided by bytes is the intensity. A low one means that the step waits for memory, a high one that it
    waits for arithmetic. Only weights and the KV cache count: other values stay in the processor's caches.
(in total: )?[\d.]+% of the limit
    The larger of bytes / bandwidth and FLOPs / rate, both measured on this machine: no kernel can be faster.
limits,
    Measured by the engine's own kernels on registers and on memory, with all threads.
chunked / whole
    The FLOPs are the same. Each chunk reads all weights again.
prefill : decode
    A decode does the arithmetic of one token and moves almost the bytes of a whole prefill.
instructions
    Equal instructions, as those of all layers, are one entry.
all-reduces took
    The time of rank 0, which waits in each sum for the slowest rank.
speed-up
    The time here over the time there.
memory of
    Allocated is what tensors hold, reserved what PyTorch keeps of the device for further ones.
only the last position
    The head's product is as wide as the vocabulary. The logits of earlier positions would predict tokens that
    are known.
token \d+
    Softmax turns logits into these probabilities. Greedy decoding takes the largest; a temperature would draw.
step \d+: positions .* samples nothing
    The prompt is not complete, so its next token is known. The chunk's keys and values are kept.
step \d+: positions .* samples the first
    This chunk has the prompt's last token, whose row predicts the first new one.
the prompt fits in one chunk
    A chunk is a limit on tokens per step, not a size: shorter prompts are not padded.
output:
    Chunks compute the same sums over the same keys and values, so that nothing depends on where a prompt is
    split.
step \d+: position \d+, T = 1
    The row of the newest token attends to all keys before it: pairs grow by one a step, the rest stays the
    same.
\d+× .*Norm
    RMS norm scales each row to a mean square of 1. It quantises its result where the next product takes 8-bit
    values.
\d+× WriteKv
    Rotates queries and keys by their positions and writes keys and values to their slots in the KV cache.
\d+× QK
    Reads the keys and values of each sequence through its block table: softmax(q · k / √d) · v. Scores of later
    positions are dropped by the mask, and never computed; uncausal counts them.
\d+× AllReduce
    Each rank has a part of the sum. Ranks write their parts to shared memory and add them in the order of the ranks.
\d+× Embed
    A table's row per token id: bytes are read, nothing is computed.
\d+× .*qkv_proj
    One product makes queries, keys and values: their three weights are stored as one, so that x is read once.
\d+× .*(o_proj|dense|c_proj)
    It mixes the heads' results and brings them back to the model's width.
\d+× .*gate_up_proj
    Gate and up projection are one product. silu(gate) · up is computed as it leaves, with half the columns.
\d+× .*down_proj
    It brings the wide inner values of the MLP back to the model's width, to be added to the residual.
\d+× .*(embed|lm_head)
    The head: one logit per token of the vocabulary. This model may use its embedding table for it.
(prefill|chunk|decode) +
    FLOPs of a product are 2 · rows · inputs · outputs. The bytes are the weight's, read once, so the quotient grows
    with the rows. The time is the mean of the instructions.
the first chunk samples
    Without a token to sample no logits are needed.
\d+×
    A weight [outputs, inputs] multiplies rows [T, inputs] to rows [T, outputs].
without:
    Each step computes the rows of the whole sequence so far: the sum of its lengths.
with:
    The prompt's rows once, then one row per token. The last token is sampled and never computed.
without / with
    Time falls by less than rows: one row alone reads every weight, many rows share that reading.
order in the first layer
    Columns, then rows: the first product of a pair leaves parts of its outputs, the second sums over them.
\d+ all-reduces
    Two a layer, after attention and after the MLP; one more sums the embedding, whose rows are split.
\d+ all-gather
    Each rank computes the logits of its part of the vocabulary.
.* (prefill|decode):
    Both devices computed the same prompt with the same weights.
this (machine|tour)
    With a CUDA GPU the tour runs the prompt on both and shows the times side by side.
"""
_PAIRS = re.findall(r"^(\S.*)\n((?:    .*\n)+)", _REASONS, re.MULTILINE)


def reason_of(line: str) -> str | None:
    """Return why a line of the tour says what it says; None if its stop's own reason says it."""
    return next((" ".join(reason.split()) for pattern, reason in _PAIRS if re.match(pattern, line.strip())), None)
