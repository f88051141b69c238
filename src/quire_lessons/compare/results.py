"""`RunSettings` and `Comparison`: the input and the result of every comparison, as plain values without behaviour.

The command line prints them, `figure.py` draws them, and the web page's Lab sends them as JSON.
Next to read: `rig.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError

FAKE_MODEL = "fake"
"""Model name of `FakeExecutor`: no weights, and a step takes one unit of time."""
MAX_REQUESTS, MAX_CONTEXT, MAX_RANK = 10_000, 1 << 17, 256
MAX_POINTS = 4096
DEFAULT_LEN = 16
"""Tokens of prompts or outputs where only the other length is given."""
MIN_DRAWN_CONTEXT = 32
Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps or requests done, and their total."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request of a workload: it generates exactly `num_tokens` tokens."""

    prompt: tuple[int, ...]
    num_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Input of a comparison. None: the comparison chooses, and reports its choice in `Comparison.settings`.

    model: model to run; `FAKE_MODEL`: no model, time counts engine steps.
    rate: requests that arrive per unit of time: per second with a model, else per step.
    rank: of adapters.
    pool_bytes: size of the KV cache. context: length of sequences, each comparison says of which.
    prompt_lens, output_lens: lengths of the requests, from the start again where there are fewer than requests.
    """

    model: str | None = None
    seed: int = 0
    requests: int | None = None
    slots: int = 8
    rate: float | None = None
    pool_bytes: int | None = None
    context: int | None = None
    rank: int | None = None
    prompt_lens: tuple[int, ...] = ()
    output_lens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("requests", 1, MAX_REQUESTS),
            ("slots", 1, 1024),
            ("context", 2, MAX_CONTEXT),
            ("rank", 1, MAX_RANK),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name}={value} is not in {least} … {most}")
        for name in ("prompt_lens", "output_lens"):
            for value in getattr(self, name):
                if not 1 <= value < MAX_CONTEXT:
                    raise ConfigError(f"{name} has {value}, which is not in 1 … {MAX_CONTEXT - 1}")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate={self.rate} is not a positive number of requests per unit of time")

    def lengths(self) -> list[tuple[int, int]]:
        """Return prompt and output tokens of each request whose lengths are given; nothing if none are."""
        given = max(len(self.prompt_lens), len(self.output_lens))
        prompts, outputs = (values or (DEFAULT_LEN,) for values in (self.prompt_lens, self.output_lens))
        count = (self.requests or given) if given else 0
        return [(prompts[at % len(prompts)], outputs[at % len(outputs)]) for at in range(count)]

    def check_context(self, name: str) -> None:
        """Raise ConfigError if the context is too short to draw lengths for the comparison `name`."""
        if self.context is not None and self.context < MIN_DRAWN_CONTEXT:
            raise ConfigError(
                f"compare {name} draws lengths of requests for context={self.context}: {MIN_DRAWN_CONTEXT} or more fits"
            )


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one mode: (x, y), or for spans (start, end, row). `shade`: weight of its colour, 0 … 1."""

    name: str
    points: tuple[tuple[float, ...], ...]
    shade: float = 1.0


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of series.

    Fields:
        kind: "line", "spans" (horizontal bars), or "bars" (spans from 0, one per series).
        x_most: right end of the x-axis, where several charts share one; None: the largest value.
    """

    title: str
    x_label: str
    y_label: str
    kind: str
    series: tuple[Series, ...]
    x_most: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `run`. `outputs_equal`: requests whose tokens were compared and equal in all modes; None: no outputs.

    columns: name and unit of each: "", "text", "number", "share", "times", "bytes",
        "seconds" or "steps".
    rows: figures of each mode, its name first; None where nothing was measured.
    explanation: a sentence per mode that explains its figures.
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Any, ...], ...]
    explanation: tuple[str, ...]
    charts: tuple[Chart, ...]
    outputs_equal: int | None = None


def thinned(points: Iterable[tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
    """Return points of a line, at most `MAX_POINTS` or so: a long run has a million steps, a drawing 760 columns."""
    found = tuple(points)
    every = -(-len(found) // MAX_POINTS) or 1
    return found[::every] + (found[-1:] if (len(found) - 1) % every else ())


def percentile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
