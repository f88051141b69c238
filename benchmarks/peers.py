"""Quire beside other engines: the same model, prompts and threads, taking turns in one run. `make bench` runs this.

    python -m benchmarks.peers [--sides quire,llama.cpp,vllm] [--cases tg64@8+d128,pp512] [--repetitions 3]

Each side is a process under its own interpreter, stopped while others measure; in each repetition of each case all
sides take a turn on the same prompts, the first one changing. Peers that are not found are named with the reason.
A peer with several ways to compute a case tries each for a moment before the turns, and has its turns with the fastest.
Cases are called as in `quire bench`: ppN is prompt processing of N tokens; tgN@C+dD generates N tokens in each of C
streams after D tokens of prompt. Next to read: `side_process.py`, `sides/protocol.py`; results: `README.md`.
"""

import argparse
import contextlib
import dataclasses
import os
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import add_shared_options, finish_arguments, write_result
from benchmarks.peer_report import NOISY_SHARE, Report, Sweep, Turn
from benchmarks.side_process import SideError, SideProcess
from benchmarks.side_specs import DEFAULT_SIDES, Models, Skipped, make_spec
from quire_workshop.bench_cases import BenchCase, random_prompts

CASES = (
    "tg64+d128", "tg64@8+d128", "tg64@32+d128", "tg64@64+d128", "pp128", "pp512", "pp2048", "tg64@8+d2048",
)  # fmt: skip
LOAD_TIMEOUT_S = 900.0
MEASURE_TIMEOUT_S = 900.0
MIN_TURN_S = 0.5
"""A side repeats a short measurement until its turn has lasted so long."""
MAX_SAMPLES_PER_TURN = 5
WARM_UP_TOKENS = 8
TRIAL_TOKENS = 16
PROMPT_SEED = 20240229


def parse_case(name: str) -> BenchCase:
    """The case of a name. Raises: ValueError."""
    if found := re.fullmatch(r"pp(\d+)(?:@(\d+))?", name):
        return BenchCase(int(found[1]), 0, int(found[2] or 1))
    if found := re.fullmatch(r"tg(\d+)(?:@(\d+))?(?:\+d(\d+))?", name):
        return BenchCase(int(found[3] or 1), int(found[1]), int(found[2] or 1))
    raise ValueError(f"{name!r} is no case: ppN@STREAMS as pp2048@8, or tgN@STREAMS+dDEPTH as tg64@8+d128")


def measure_turn(side: SideProcess, case: BenchCase, prompts: list[list[int]], settings: Mapping[str, Any]) -> Turn:
    """Measure a side's turn. Raises: SideError."""
    samples: list[float] = []
    answering_s, elsewhere_s, measured_s = side.answering_s, side.cpu_elsewhere_s, 0.0
    while not samples or (measured_s < MIN_TURN_S and len(samples) < MAX_SAMPLES_PER_TURN):
        answer = side.request(
            "measure", timeout_s=MEASURE_TIMEOUT_S, prompts=prompts, num_generated=case.num_generated,
            settings=settings,
        )  # fmt: skip
        if not answer["tokens"]:
            raise SideError(f"{side.name}: some streams had ended before all had begun; generate more tokens")
        samples.append(answer["tokens"] / answer["seconds"])
        measured_s += answer["seconds"]
    available_s = (side.answering_s - answering_s) * (os.cpu_count() or 1)
    share = (side.cpu_elsewhere_s - elsewhere_s) / available_s
    return Turn(samples, min(1.0, max(0.0, share)), answer["token_ids"])


def quiet_turn(
    side: SideProcess, case: BenchCase, prompts: list[list[int]], settings: Mapping[str, Any], retries: int
) -> Turn:
    """A turn that others did not disturb, or the least disturbed one of some. Raises: SideError."""
    turns = [measure_turn(side, case, prompts, settings)]
    while turns[-1].cpu_elsewhere > NOISY_SHARE and len(turns) <= retries:
        turns.append(measure_turn(side, case, prompts, settings))
    return min(turns, key=lambda turn: turn.cpu_elsewhere)


def sweep_settings(side: SideProcess, case: BenchCase, prompts: list[list[int]], retries: int) -> Sweep:
    """Try a side's alternatives in a case, one after another; each that is faster stays. Raises: SideError."""
    if not side.has_alternatives:
        return Sweep({}, [])
    shape = {"num_streams": case.num_streams, "num_prompt": case.num_prompt, "num_generated": case.num_generated}
    tries = side.request("alternatives", timeout_s=MEASURE_TIMEOUT_S, **shape)["alternatives"]
    short = dataclasses.replace(case, num_generated=min(case.num_generated, TRIAL_TOKENS))
    best: dict[str, Any] = {}
    tried: list[tuple[dict[str, Any], float]] = []
    for settings in [{}, *tries]:
        candidate = {**best, **settings}
        try:
            speed = statistics.median(quiet_turn(side, short, prompts, candidate, retries).tokens_per_s)
        except SideError:
            if not settings:
                raise
            # The peer refused these settings, or died of them.
            speed = 0.0
            side.ensure_running()
        if speed > max((speed for _, speed in tried), default=0.0):
            best = candidate
        tried.append((candidate, speed))
    return Sweep(best, tried)


def measure_case(
    sides: list[SideProcess], case: BenchCase, prompt_sets: Sequence[list[list[int]]], report: Report, retries: int
) -> None:
    """All repetitions of a case. A side that fails is reported and leaves the run. Mutates: `sides`."""
    sweeps: dict[str, Sweep] = {}
    for repetition in range(-1, len(prompt_sets)):
        first = repetition % len(sides) if sides else 0
        for side in sides[first:] + sides[:first]:
            try:
                if repetition < 0:
                    side.request(
                        "measure", timeout_s=MEASURE_TIMEOUT_S, prompts=prompt_sets[0],
                        num_generated=min(case.num_generated, WARM_UP_TOKENS),
                    )  # fmt: skip
                    sweeps[side.name] = sweep_settings(side, case, prompt_sets[0], retries)
                    report.swept(side.name, case, sweeps[side.name])
                else:
                    settings = sweeps[side.name].settings
                    report.add(side.name, case, quiet_turn(side, case, prompt_sets[repetition], settings, retries))
            except SideError as error:
                report.skip(side.name, f"{case.name}: {error}")
                sides.remove(side)
                side.close()


def start_sides(
    names: Sequence[str], models: Models, arguments: argparse.Namespace, cases: Sequence[BenchCase],
    stack: contextlib.ExitStack, report: Report,
) -> list[SideProcess]:  # fmt: skip
    """Start and load what is found, one after another."""
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-")))
    sides: list[SideProcess] = []
    for index, name in enumerate(names):
        try:
            spec = make_spec(name, models, vars(arguments))
            print(f"loading {name}", file=sys.stderr)
            side = stack.enter_context(SideProcess(spec, logs / f"{index}.log"))
            side.load(
                timeout_s=LOAD_TIMEOUT_S,
                num_threads=arguments.threads,
                max_num_seqs=max(case.num_streams for case in cases),
                max_model_len=max(case.len_needed for case in cases) + 1,
            )
        except (Skipped, SideError) as error:
            report.skip(name, str(error))
            continue
        report.loaded(side)
        sides.append(side)
    return sides


def run(arguments: argparse.Namespace) -> Report:
    """Measure everything, printing rows as they are known."""
    models = Models.of(arguments.model, arguments.bf16)
    cases = [parse_case(name) for name in arguments.cases]
    report = Report(models, arguments.threads, cases)
    with contextlib.ExitStack() as stack:
        sides = start_sides(arguments.sides, models, arguments, cases, stack, report)
        report.find_limits(sides)
        report.begin([side.name for side in sides])
        for case in cases:
            generator = random.Random(f"{PROMPT_SEED} {case.name}")
            prompt_sets = [
                random_prompts(case, models.vocab_size, models.tokenizer.special_token_ids, generator)
                for _ in range(arguments.repetitions)
            ]
            measure_case(sides, case, prompt_sets, report, arguments.retries)
            report.row(case)
        report.end(sides)
    return report


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shared_options(parser, DEFAULT_SIDES, what="peers")
    parser.add_argument("--cases", default=",".join(CASES), help="[%(default)s]")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each side per case  [3]")
    parser.add_argument("--retries", type=int, default=2, help="turns measured again if disturbed  [2]")
    arguments = finish_arguments(parser, words)
    arguments.cases = [name for name in arguments.cases.split(",") if name]
    try:
        for name in arguments.cases:
            parse_case(name)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    arguments = parse_arguments()
    write_result(run(arguments).as_json(), arguments)


if __name__ == "__main__":
    main()
