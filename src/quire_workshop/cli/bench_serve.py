"""`quire bench serve`: load on an OpenAI-compatible server, Quire's or another, and the latency of its clients.

Next to read: `../load_client.py`.
"""

import math
import random
import re
import statistics
from collections import Counter
from typing import Any, NamedTuple

import click

from quire.cli.command import ExitCode, option, output_of, verb
from quire.cli.options import LENGTHS, NamedValueError, Value
from quire.cli.server_client import (
    CHAT_PATH,
    ServerAnswerError,
    ServerClient,
    ServerUnreachableError,
    StreamedAnswer,
    api_key,
    find_model,
    find_url,
    served_model_option,
    url_option,
)
from quire.errors import QuireError
from quire_workshop.load_client import Load, LoadResult, LoadTarget, highest_rate, put_load

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


def _parse_limits(text: str) -> tuple[Limit, ...]:
    """Parse limits such as `ttft_p95<500ms,itl_p99<0.1s`."""
    limits = []
    for part in text.split(","):
        match = _SLO.fullmatch(part.strip())
        if match is None:
            raise NamedValueError(f"'{part}' is not a limit such as ttft_p95<500ms, itl_p99<0.1s or e2e_p50<10s")
        limits.append(Limit(match[1], int(match[2]), float(match[3]) * (1000 if match[4] == "s" else 1)))
    return tuple(limits)


def _parse_rates(text: str) -> tuple[float, ...]:
    rates = tuple(float(part) for part in text.split(",") if part.strip())
    if not all(0 < rate < math.inf for rate in rates):
        raise NamedValueError(f"'{text}': rates are above 0")
    return rates


SLO = Value("limits", _parse_limits, "limits")
RATES = Value("r,…", _parse_rates, "a list of numbers such as 1,2.5,4")


@verb("bench serve", EXAMPLES)
@url_option
@served_model_option
@option("-c", "--concurrency", type=LENGTHS, default=(), help="clients at once  [1,8,32]")
@option("--rate", "rates", type=RATES, default=(), help="requests per second, instead")
@option(
    "--requests",
    "num_requests",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="requests per row  [3 per client, at least 32]",
)
@option(
    "--prompt",
    "num_words",
    type=click.IntRange(1, 1_000_000),
    default=100,
    metavar="N",
    help="words of a prompt  [100]",
)
@option(
    "--gen",
    "num_generated",
    type=click.IntRange(2, 1_000_000),
    default=128,
    metavar="N",
    help="tokens to generate  [128]",
)
@option("--slo", type=SLO, default=(), help="limits to hold, e.g. ttft_p95<500ms")
@option("--sweep", is_flag=True, help="search the highest rate that holds --slo")
@option("--seed", type=int, default=0, metavar="N", help="of prompts and gaps  [0]")
def bench_serve_command(
    url: str | None,
    model: str | None,
    concurrency: tuple[int, ...],
    rates: tuple[float, ...],
    num_requests: int | None,
    num_words: int,
    num_generated: int,
    slo: tuple[Limit, ...],
    sweep: bool,
    seed: int,
) -> None:
    """Put load on a server and measure latency and throughput at its clients.

    Each client streams chat completions of --gen tokens from prompts of about --prompt words, all different. With
    --concurrency, each client sends its next request when its last is answered; with --rate, requests come at random
    times, R per second on average. TTFT: time to the first text. ITL: time between two pieces of text. With --slo, the
    exit code is 6 when a limit is exceeded; with --sweep, the highest rate that holds the limits is searched.
    """
    output = output_of()
    _check_choice(concurrency, rates, slo, sweep=sweep)
    url = find_url(url)
    endpoint = LoadTarget(url, CHAT_PATH, api_key())
    if model is None:
        with ServerClient(url) as client:
            model = find_model(client, None).name
    bodies = Bodies(model, num_words, num_generated, seed)
    results: list[LoadResult] = []

    def measure(load: Load) -> bool:
        count = num_requests or max(32, 3 * (load.concurrency or 0))
        result = put_load(endpoint, load, bodies.take(count), seed=seed)
        if not output.json:
            if not results:
                output.result("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
            output.result("| " + " | ".join(_cells(result)) + " |")
        results.append(result)
        return _holds(result, slo)

    warm_up = put_load(endpoint, Load(concurrency=1), bodies.take(1))
    if not warm_up.good:
        raise _refusal(warm_up.answers[0])
    found, holds = None, [True]
    if sweep:
        found = highest_rate(lambda value: measure(Load(rate=value)), 1.0)
    else:
        loads = [Load(rate=rate) for rate in rates] or [Load(concurrency=count) for count in concurrency or (1, 8, 32)]
        holds = [measure(load) for load in loads]
    limits = ", ".join(map(str, slo))
    if output.json:
        rows = [_as_json(result, slo) for result in results]
        value = {"rows": rows, "slo": [str(limit) for limit in slo], "highest_rate": found}
        output.result_json("quire.bench-serve/1", value)
    elif found is not None:
        output.result(f"highest rate that holds {limits}: {found:g} req/s" if found else f"no rate holds {limits}")
    if not all(holds):
        output.note(f"a limit is exceeded: {limits}", style="red")
        click.get_current_context().exit(int(ExitCode.CHECK_FAILED))


def _check_choice(
    concurrency: tuple[int, ...], rates: tuple[float, ...], slo: tuple[Limit, ...], *, sweep: bool
) -> None:
    if 0 in concurrency:
        raise click.UsageError("--concurrency is at least 1")
    if sum((bool(concurrency), bool(rates), sweep)) > 1:
        raise click.UsageError("--concurrency, --rate and --sweep exclude each other")
    if sweep and not slo:
        raise click.UsageError('--sweep needs limits to hold: --slo "ttft_p95<500ms"')


def _refusal(answer: StreamedAnswer) -> QuireError:
    """Return the error of a warm-up request without text."""
    reason = answer.error or "it sent no text"
    if not answer.status:
        return ServerUnreachableError(f"no HTTP server answers there: {reason}")
    if answer.status == 200:
        return ServerAnswerError(200, f"the server does not answer: {reason}", "no_answer")
    return ServerAnswerError.of(answer.status, reason.encode())


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
        choose = self._random
        texts = [
            f"{choose.getrandbits(64):x} {' '.join(choose.choices(WORDS, k=self._num_words))}" for _ in range(count)
        ]
        return [{**self._fixed, "messages": [{"role": "user", "content": text}]} for text in texts]


def _cells(result: LoadResult) -> list[str]:
    def three(metric: str, scale: float, digits: int) -> str:
        return " / ".join(f"{result.percentile_ms(metric, percent) / scale:.{digits}f}" for percent in PERCENTS)

    num_good = len(result.good)
    return [
        result.load.name,
        str(num_good),
        str(len(result.answers) - num_good),
        f"{num_good / result.duration_s:.2f}",
        f"{result.tokens_per_s:.0f}",
        three("ttft", 1, 0),
        three("itl", 1, 1),
        three("e2e", 1000, 2),
    ]


def _as_json(result: LoadResult, slo: tuple[Limit, ...]) -> dict[str, Any]:
    return {
        "load": result.load.name,
        "concurrency": result.load.concurrency,
        "rate": result.load.rate,
        "duration_s": result.duration_s,
        "num_answers": len(result.good),
        "num_failed": len(result.answers) - len(result.good),
        "errors": Counter(answer.error for answer in result.answers if answer.error is not None),
        "prompt_tokens": statistics.median([answer.num_prompt_tokens for answer in result.good] or [0]),
        "requests_per_s": len(result.good) / result.duration_s,
        "tokens_per_s": result.tokens_per_s,
        **{
            f"{metric}_ms": {f"p{percent}": result.percentile_ms(metric, percent) for percent in PERCENTS}
            for metric in METRICS
        },
        "holds_slo": _holds(result, slo),
    }
