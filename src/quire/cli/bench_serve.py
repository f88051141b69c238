"""`quire bench serve`: load on an OpenAI-compatible server, Quire's or another, and the latency of its clients.

Next to read: `load_client.py`.
"""

import math
import random
import re
from typing import Any, NamedTuple

import click

from quire.cli.command import GroupedOption, VerbCommand, output_of
from quire.cli.exit_codes import ExitCode
from quire.cli.load_client import Endpoint, Load, LoadResult, highest_rate, median_tokens, put_load
from quire.cli.output import Output
from quire.cli.server_client import (
    CHAT_PATH,
    URL_HELP,
    Answer,
    ServerAnswerError,
    ServerClient,
    api_key,
    find_model,
    find_url,
)
from quire.cli.values import LENGTHS
from quire.errors import QuireError

HELP = """Put load on a server and measure latency and throughput at its clients.

Each client streams chat completions of --gen tokens from prompts of about --prompt words, all different. With
--concurrency, each client sends its next request when its last is answered; with --rate, requests come at random
times, R per second on average. TTFT: time to the first text. ITL: time between two pieces of text. With --slo, the
exit code is 6 when a limit is exceeded; with --sweep, the highest rate that holds the limits is searched.
"""
EXAMPLES = (
    "quire bench serve --concurrency 1,8,32",
    "quire bench serve --url http://127.0.0.1:8000 --rate 2,4,8 --requests 100 --json",
    'quire bench serve --sweep --slo "ttft_p95<500ms,itl_p95<100ms"',
)
METRICS = ("ttft", "itl", "e2e")
PERCENTS = (50, 95, 99)
HEADER = (
    "load", "answers", "failed", "req/s", "tok/s", "TTFT ms p50/p95/p99", "ITL ms p50/p95/p99", "e2e s p50/p95/p99",
)  # fmt: skip
WORDS = [
    "time", "river", "stone", "light", "paper", "green", "music", "window", "silver", "garden", "number", "forest",
    "letter", "circle", "bridge", "winter",
]  # fmt: skip
_SLO = re.compile(r"(ttft|itl|e2e)_p(\d{1,2})\s*<\s*(\d+(?:\.\d+)?)\s*(ms|s)")


class Limit(NamedTuple):
    """A service level objective: a percentile of a metric must stay below `limit_ms`."""

    metric: str
    percent: int
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric}_p{self.percent}<{self.limit_ms:g}ms"


class Slo(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """Limits such as `ttft_p95<500ms,itl_p99<0.1s`."""

    name = "limits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Limit, ...]:
        """Return the limits; fails naming the first that cannot be read."""
        if isinstance(value, tuple):
            return value
        limits = []
        for part in str(value).split(","):
            match = _SLO.fullmatch(part.strip())
            if match is None:
                self.fail(f"'{part}' is not a limit such as ttft_p95<500ms, itl_p99<0.1s or e2e_p50<10s", param, ctx)
            limits.append(Limit(match[1], int(match[2]), float(match[3]) * (1000 if match[4] == "s" else 1)))
        return tuple(limits)


@click.command(
    "bench serve", cls=VerbCommand, help=HELP, short_help="Put load on a server and measure its clients' latency.",
    examples=EXAMPLES,
)  # fmt: skip
@click.option("--url", envvar="QUIRE_URL", cls=GroupedOption, help=URL_HELP)
@click.option("--model", metavar="NAME", cls=GroupedOption, help="the model's name there  [the server's first]")
@click.option("-c", "--concurrency", type=LENGTHS, default=(), cls=GroupedOption, help="clients at once  [1,8,32]")
@click.option("--rate", type=str, default="", metavar="R,…", cls=GroupedOption, help="requests per second, instead")
@click.option("--requests", "num_requests", type=click.IntRange(1, 1_000_000), metavar="N", cls=GroupedOption,
              help="requests per row  [3 per client, at least 32]")  # fmt: skip
@click.option("--prompt", "num_words", type=click.IntRange(1, 1_000_000), default=100, metavar="N", cls=GroupedOption,
              help="words of a prompt  [100]")  # fmt: skip
@click.option("--gen", "num_generated", type=click.IntRange(2, 1_000_000), default=128, metavar="N", cls=GroupedOption,
              help="tokens to generate  [128]")  # fmt: skip
@click.option("--slo", type=Slo(), default=(), cls=GroupedOption, help="limits to hold, e.g. ttft_p95<500ms")
@click.option("--sweep", is_flag=True, cls=GroupedOption, help="search the highest rate that holds --slo")
@click.option("--seed", type=int, default=0, metavar="N", cls=GroupedOption, help="of prompts and gaps  [0]")
def bench_serve_command(
    url: str | None, model: str | None, concurrency: tuple[int, ...], rate: str, num_requests: int | None,
    num_words: int, num_generated: int, slo: tuple[Limit, ...], sweep: bool, seed: int,
) -> None:  # fmt: skip
    """Measure each load, or search for the highest."""
    output = output_of()
    rates = _rates(rate)
    if 0 in concurrency:
        raise click.UsageError("--concurrency is at least 1")
    if sum((bool(concurrency), bool(rates), sweep)) > 1:
        raise click.UsageError("--concurrency, --rate and --sweep exclude each other")
    if sweep and not slo:
        raise click.UsageError('--sweep needs limits to hold: --slo "ttft_p95<500ms"')
    url = find_url(url)
    endpoint = Endpoint.parse(url, CHAT_PATH, api_key())
    if model is None:
        with ServerClient(url) as client:
            model = find_model(client, None).name
    bodies = Bodies(model, num_words, num_generated, seed)

    def measure(load: Load) -> LoadResult:
        count = num_requests or max(32, 3 * (load.concurrency or 0))
        result = put_load(endpoint, load, bodies.take(count), seed=seed)
        table.row(result)
        return result

    table = _Table(output)
    warm_up = put_load(endpoint, Load(concurrency=1), bodies.take(1))
    if not warm_up.good:
        raise _refusal(warm_up.answers[0])
    if sweep:
        found = highest_rate(lambda value: _holds(measure(Load(rate=value)), slo), 1.0)
        table.end(slo, found)
        return
    loads = [Load(rate=value) for value in rates] or [Load(concurrency=value) for value in concurrency or (1, 8, 32)]
    results = [measure(load) for load in loads]
    table.end(slo, None)
    if not all(_holds(result, slo) for result in results):
        output.note(f"a limit is exceeded: {', '.join(map(str, slo))}", style="red")
        click.get_current_context().exit(int(ExitCode.CHECK_FAILED))


def _refusal(answer: Answer) -> QuireError:
    """Return the error of a warm-up request without text."""
    reason = answer.error or "it sent no text"
    if answer.status == 200:
        return ServerAnswerError(200, f"the server does not answer: {reason}", "no_answer")
    return ServerAnswerError.of(answer.status, reason.encode())


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise click.UsageError(f"--rate {text!r} is not a list of numbers such as 1,2.5,4") from None
    if not all(0 < rate < math.inf for rate in rates):
        raise click.UsageError(f"--rate {text!r}: rates are above 0")
    return rates


def _holds(result: LoadResult, slo: tuple[Limit, ...]) -> bool:
    if len(result.good) < len(result.answers):
        return not slo
    return all(result.percentile_ms(limit.metric, limit.percent) < limit.limit_ms for limit in slo)


class Bodies:
    """Endless request bodies whose prompts begin differently: the prefix cache never hits."""

    def __init__(self, model: str, num_words: int, num_generated: int, seed: int, **others: Any) -> None:
        """`others`: more fields of every body."""
        self._random = random.Random(seed)
        self._num_words = num_words
        self._fixed = {
            "model": model,
            "max_tokens": num_generated,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **others,
        }

    def take(self, count: int) -> list[dict[str, Any]]:
        """Return the next bodies."""
        return [self._next() for _ in range(count)]

    def _next(self) -> dict[str, Any]:
        text = f"{self._random.getrandbits(64):x} " + " ".join(self._random.choices(WORDS, k=self._num_words))
        return {**self._fixed, "messages": [{"role": "user", "content": text}]}


class _Table:
    """Prints rows as they are measured, or one JSON object at the end."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._results: list[LoadResult] = []

    def row(self, result: LoadResult) -> None:
        """Print the row of one load."""
        if not self._results and not self._output.json:
            self._output.result("| " + " | ".join(HEADER) + " |")
            self._output.result("|" + " --- |" * len(HEADER))
        self._results.append(result)
        if not self._output.json:
            self._output.result("| " + " | ".join(_cells(result)) + " |")

    def end(self, slo: tuple[Limit, ...], found: float | None) -> None:
        """Print the result of a sweep, or the JSON. `found`: the highest rate that held the limits, of a sweep."""
        if self._output.json:
            rows = [_as_json(result, slo) for result in self._results]
            self._output.result_json("quire.bench-serve/1", {"rows": rows, "slo": [str(item) for item in slo],
                                                             "highest_rate": found})  # fmt: skip
        elif found is not None:
            limits = ", ".join(map(str, slo))
            self._output.result(
                f"highest rate that holds {limits}: {found:g} req/s" if found else f"no rate holds {limits}"
            )


def _cells(result: LoadResult) -> list[str]:
    def three(metric: str, scale: float, digits: int) -> str:
        return " / ".join(f"{result.percentile_ms(metric, percent) / scale:.{digits}f}" for percent in PERCENTS)

    num_good = len(result.good)
    return [
        result.load.name, str(num_good), str(len(result.answers) - num_good), f"{num_good / result.duration_s:.2f}",
        f"{result.tokens_per_s:.0f}", three("ttft", 1, 0), three("itl", 1, 1), three("e2e", 1000, 2),
    ]  # fmt: skip


def _as_json(result: LoadResult, slo: tuple[Limit, ...]) -> dict[str, Any]:
    errors: dict[str, int] = {}
    for answer in result.answers:
        if answer.error is not None:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    return {
        "load": result.load.name,
        "concurrency": result.load.concurrency,
        "rate": result.load.rate,
        "duration_s": result.duration_s,
        "num_answers": len(result.good),
        "num_failed": len(result.answers) - len(result.good),
        "errors": errors,
        "prompt_tokens": median_tokens(result),
        "requests_per_s": len(result.good) / result.duration_s,
        "tokens_per_s": result.tokens_per_s,
        **{
            f"{metric}_ms": {f"p{percent}": result.percentile_ms(metric, percent) for percent in PERCENTS}
            for metric in METRICS
        },
        "holds_slo": _holds(result, slo),
    }
