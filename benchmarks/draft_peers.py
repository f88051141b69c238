"""Quire's drafts beside prompt lookup in llama.cpp and Transformers: the same files, edited by the same greedy model.

`python -m benchmarks.drafts --beside` runs this. Sides take turns as in `peers.py`, one stream each; each repetition
edits another file, so that no engine can know its answer. A side's tokens per second are those of all repetitions
together. Weights: Quire and llama.cpp compute with the GGUF file, Transformers with its values in bf16 or fp32.
Next to read: `drafts.py`; `sides/llama_cpp.py` and `sides/transformers.py` for the lookups.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import quire
from benchmarks.command_line import Table
from benchmarks.side_process import SideError, SideProcess
from benchmarks.side_specs import Models, Skipped, make_spec
from quire.text.tokenizer import Tokenizer

SOURCES = sorted(Path(quire.__file__).parent.glob("*/*.py"), key=lambda path: path.stat().st_size)[-80:]
FILE_TOKENS, NUM_NEW = 400, 256
FIRST_TOKENS = 16
"""Tokens of the answer that are given, so that the model knows what to write."""
SIDES = (
    "quire:speculative=suffix", "quire", "llama.cpp:lookup=10", "llama.cpp:lookup=2", "llama.cpp",
    "transformers:prompt_lookup=10", "transformers:dtype=float32:prompt_lookup=10",
)  # fmt: skip
WARM_UP = (len(SOURCES) - 1, 64)
"""The file and the number of tokens with which each side begins, and which do not count."""
TIMEOUT_S = 900.0
MAX_MODEL_LEN = 2048
TITLES = {"side": "", "tok/s": ".1f", "first / side": ".2f", "same tokens": ".0%"}


def edit_prompt(tokenizer: Tokenizer, number: int) -> list[int]:
    """Return a file, the same with another name for `self`, and the first tokens of the file."""
    text = SOURCES[number % len(SOURCES)].read_text()
    token_ids = tokenizer.encode(text)[:FILE_TOKENS]
    changed = tokenizer.encode(tokenizer.decode(token_ids).replace("self", "this"))
    return [*token_ids, *changed, *token_ids[:FIRST_TOKENS]]


def measure(sides: list[SideProcess], models: Models, repetitions: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield each side's name, tokens per second, the first side's relative to it, and the share of equal tokens."""
    seconds = dict.fromkeys((side.name for side in sides), 0.0)
    tokens = dict.fromkeys(seconds, 0)
    texts: dict[str, list[int]] = {name: [] for name in seconds}
    for repetition in range(-1, repetitions):
        number, num_new = WARM_UP if repetition < 0 else (repetition, NUM_NEW)
        prompts = [edit_prompt(models.tokenizer, number)]
        first = repetition % len(sides)
        for side in sides[first:] + sides[:first]:
            answer = side.request("measure", timeout_s=TIMEOUT_S, prompts=prompts, num_generated=num_new)
            if repetition >= 0:
                seconds[side.name] += answer["seconds"]
                tokens[side.name] += answer["tokens"]
                texts[side.name] += answer["token_ids"][0][:NUM_NEW]
    reference = sides[0].name
    for name, text in texts.items():
        rate = tokens[name] / seconds[name]
        equal = sum(a == b for a, b in zip(text, texts[reference], strict=False)) / len(text)
        yield name, rate, tokens[reference] / seconds[reference] / rate, equal


def run_beside(arguments: argparse.Namespace) -> None:
    """Print a row per side that is found. Raises: SideError if one fails."""
    models = Models.of(arguments.model)
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
        sides: list[SideProcess] = []
        for index, name in enumerate(arguments.sides.split(",")):
            try:
                side = stack.enter_context(SideProcess(make_spec(name, models, vars(arguments)), logs / f"{index}.log"))
            except Skipped as reason:
                print(f"{name}: {reason}", file=sys.stderr)
                continue
            side.load(timeout_s=TIMEOUT_S, num_threads=arguments.threads, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
            sides.append(side)
        if not sides:
            raise SideError("none of the sides is here")
        rows = measure(sides, models, arguments.repetitions)
        table = Table(TITLES, as_json=arguments.json)
        for row in rows:
            table.row(*row)
