"""`quire bench`: prompt processing and generation speed, as a table in the manner of llama-bench, or JSON.

Prints each row when it is measured, with the mean and standard deviation over repetitions.
Next to read: `../bench_cases.py`.
"""

import dataclasses
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire import __version__
from quire.cli.command import option, output_of, verb
from quire.cli.options import LENGTHS, OF_SERVE, chosen_options, option_flags
from quire.cli.run import open_engine
from quire.cli.terminal import Output, format_count, padded
from quire.config import EngineConfig, EngineOptions
from quire.errors import ConfigError
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source
from quire_workshop.bench_cases import BenchCase, Measurement, bench_cases, measure, random_prompts

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine
    from quire.runtime.machine_limits import MachineLimits

EXAMPLES = ("quire bench", "quire bench smollm2 -p 512,2K -n 128 --concurrency 1,8,32 -r 5 --json")
PROMPT_SEED = 20240229
SPEED_WIDTH = 20


@verb("bench", EXAMPLES)
@click.argument("model", required=False)
@option("-p", "--n-prompt", type=LENGTHS, default=(512,), help="prompt lengths  [512]")
@option("-n", "--n-gen", type=LENGTHS, default=(128,), help="tokens to generate  [128]")
@option("-c", "--concurrency", type=LENGTHS, default=(1, 32), help="requests at once  [1,32]")
@option("-d", "--n-depth", type=LENGTHS, default=(0,), help="tokens in the context before tg  [0]")
@option("-r", "--repetitions", type=click.IntRange(1, 1000), metavar="N", default=3, help="per row  [3]")
@option("--warm-up/--no-warm-up", default=True, help="one repetition more, not counted  [on]")
@option_flags(EngineOptions, without=OF_SERVE | {"enable_prefix_caching", "speculative"})
def bench_command(
    model: str | None,
    n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...],
    concurrency: tuple[int, ...],
    n_depth: tuple[int, ...],
    repetitions: int,
    warm_up: bool,
    **values: Any,
) -> None:
    """Measure prompt processing and generation speed.

    ppN: tokens per second of processing a prompt of N tokens. tgN: tokens per second of generating N tokens after
    the first one; tgN@C: in C requests at once, all together. Prompts are random token ids and share no prefix;
    sampling is greedy, without drafts. Each row is the mean and the standard deviation over the repetitions. "of limit"
    is the share of what this machine's memory and matrix units allow, both measured first, in the compute type.
    """
    output = output_of()
    if 0 in concurrency:
        raise click.UsageError("--concurrency 0 measures nothing: give 1 or more")
    cases = bench_cases(n_prompt, n_gen, concurrency, n_depth)
    if not cases:
        raise click.UsageError("nothing to measure: --n-prompt and --n-gen are both 0")
    engine_values = chosen_options(values, EngineOptions)
    most_streams = max(case.num_streams for case in cases)
    engine_values.setdefault("max_num_seqs", most_streams)
    engine_values.setdefault("max_model_len", max(case.len_needed for case in cases))
    options = EngineOptions.from_kwargs(
        **{**engine_values, **({"model": model} if model else {}), "enable_prefix_caching": False, "speculative": "off"}
    )
    if most_streams > options.max_num_seqs:
        raise ConfigError(f"--concurrency {most_streams} exceeds max_num_seqs={options.max_num_seqs}: raise it")
    with open_engine(options, output) as engine:
        longest, limit = max(cases, key=lambda case: case.len_needed), engine.config.scheduler.max_model_len
        if longest.len_needed > limit:
            needed = f"{longest.name} needs a context of {longest.len_needed} tokens"
            raise ConfigError(f"{needed}, max_model_len is {limit}")
        report = _Report(output, engine.config, *rooflines(engine.config, cases), cases)
        for case in cases:
            prompts = _prompt_sets(engine, case, repetitions)
            if warm_up:
                measure(engine, case, prompts[0])
            report.row(Measurement(case, [measure(engine, case, item) for item in prompts]))
        report.end()


def rooflines(config: EngineConfig, cases: Sequence[BenchCase]) -> tuple["MachineLimits", dict[str, float]]:
    """Return the measured limits of this machine and the tokens per second that they allow in each case, by name.

    A case is one step: the prompt, or a decode of all streams in the middle of the generation. Its work is that of
    `quire explain`; a model that cannot be explained has no limits of cases.
    """
    from quire.insight.explain.phases import measured_floors

    steps = []
    for case in cases:
        decode = (case.num_prompt + case.num_generated // 2, 1)
        steps.append((decode,) * case.num_streams if case.num_generated else ((0, case.num_prompt),))
    files = resolve_source(config.options.model, revision=config.options.revision)
    checkpoint = open_checkpoint(files, with_tensors=config.options.load_format != "dummy")
    limits, floors_s = measured_floors(config, checkpoint, steps)
    tokens = [sum(count for _, count in step) for step in steps]
    return limits, {case.name: num / floor_s for case, num, floor_s in zip(cases, tokens, floors_s, strict=False)}


def _prompt_sets(engine: "LLMEngine", case: BenchCase, repetitions: int) -> list[list[list[int]]]:
    special = engine.tokenizer.special_token_ids if engine.tokenizer is not None else frozenset()
    generator = random.Random(PROMPT_SEED)
    return [random_prompts(case, engine.config.model.vocab_size, special, generator) for _ in range(repetitions)]


def bench_header(config: EngineConfig) -> dict[str, Any]:
    """Return the conditions of a measurement: model, types, machine, version."""
    return {
        "model": config.options.model,
        "architecture": config.model.architecture,
        "num_parameters": config.model.num_parameters,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_dtype,
        "device": config.device,
        "hardware": config.hardware.name,
        "num_threads": config.hardware.num_threads,
        "tensor_parallel_size": config.options.tensor_parallel_size,
        "pipeline_parallel_size": config.options.pipeline_parallel_size,
        "version": __version__,
        "commit": source_commit(),
    }


def source_commit() -> str | None:
    """Return the commit of Quire's checkout, with "-dirty" for local changes; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


class _Report:
    """Prints rows as they are measured, or one JSON object at the end."""

    def __init__(
        self,
        output: Output,
        config: EngineConfig,
        limits: "MachineLimits",
        allowed: dict[str, float],
        cases: Sequence[BenchCase],
    ) -> None:
        self._output, self._limits, self._allowed = output, limits, allowed
        header = self._header = bench_header(config)
        self._results: list[dict[str, Any]] = []
        self._fixed = [
            Path(header["model"]).name,
            format_count(header["num_parameters"]),
            header["dtype"],
            header["device"],
            f"{header['num_threads']}{f' ({ranks})' if (ranks := config.options.describe_ranks()) else ''}",
        ]
        titles = ["model", "params", "dtype", "device", "threads", "test", "tok/s (mean ± sd)", "of limit"]
        example = [*self._fixed, max((case.name for case in cases), key=len), " " * SPEED_WIDTH, ""]
        self._widths = [max(map(len, column)) for column in zip(titles, example, strict=True)]
        commit = f" ({header['commit']})" if header["commit"] else ""
        rates = ", ".join(f"{rate / 1e12:.2f} TFLOP/s in {name}" for name, rate in limits.flops_per_s.items())
        if not output.json:
            output.result(
                f"quire {header['version']}{commit} · {header['hardware']} · "
                f"reads {limits.read_bytes_per_s / 1e9:.1f} GB/s, multiplies {rates}\n"
            )
        self._line(titles)
        self._line(["-" * width for width in self._widths])

    def row(self, measurement: Measurement) -> None:
        """Print one case."""
        limit = self._allowed.get(measurement.case.name)
        share = None if limit is None else measurement.mean / limit
        self._results.append({**_as_json(measurement), "limit_tokens_per_s": limit, "share_of_limit": share})
        self._line([*self._fixed, measurement.case.name, _speed(measurement), "–" if share is None else f"{share:.0%}"])

    def end(self) -> None:
        """Print the JSON object with --json."""
        if self._output.json:
            limits = dataclasses.asdict(self._limits)
            self._output.result_json("quire.bench/1", {**self._header, "limits": limits, "results": self._results})

    def _line(self, cells: Sequence[str]) -> None:
        if not self._output.json:
            self._output.result("| " + " | ".join(padded(cells, self._widths, (1, 4, 6, 7))) + " |")


def _speed(measurement: Measurement) -> str:
    digits = 1 if measurement.mean >= 100 else 2
    return f"{measurement.mean:.{digits}f} ± {measurement.deviation:.{digits}f}"


def _as_json(measurement: Measurement) -> dict[str, Any]:
    case = measurement.case
    return {
        "test": case.name,
        "num_prompt_tokens": case.num_prompt,
        "num_generated_tokens": case.num_generated,
        "num_streams": case.num_streams,
        "mean_tokens_per_s": measurement.mean,
        "sd_tokens_per_s": measurement.deviation,
        "samples_tokens_per_s": measurement.samples,
    }
