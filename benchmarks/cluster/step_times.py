"""Seconds of a step by its work, measured on this machine for `simulate.py`.

A step takes f(rows) + context · a + pairs · b: f is piecewise linear through `ROWS`; `context` sums the tokens that
decodes attend to, `pairs` the query-key pairs of prompts. The coefficients are the non-negative least squares of
measured steps, relative to their times. Next to read: `simulate.py`.
"""

import multiprocessing
import os
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import scipy.optimize

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.events import EventKind
from quire.sampling_params import SamplingParams
from quire.types import SchedulerOutput, StepResult

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
DECODES = ((1, 64), (2, 64), (4, 64), (8, 64), (16, 64), (32, 64), (64, 64), (1, 1500), (8, 1500), (16, 1000))
PROMPTS = ((1, 32), (1, 64), (1, 128), (1, 256), (1, 512), (1, 1024), (1, 2000), (8, 32), (8, 64), (8, 128), (8, 256))
NUM_STEPS, NUM_REPEATS = 5, 3
MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a step. rows: tokens; context: tokens that decodes attend to; pairs: of prompts' attention."""

    rows: int
    context: int
    pairs: int


def work_of(output: SchedulerOutput, received: frozenset[str] | set[str] = frozenset()) -> Work:
    """Return the work of a step. Prompts of `received` were computed elsewhere: their rows cost nothing."""
    rows = context = pairs = 0
    for item in output.scheduled:
        start, count = item.num_computed_tokens, item.num_tokens
        if count > 1 and item.request_id in received:
            continue
        rows += count
        if count > 1:
            pairs += count * start + count * (count + 1) // 2
        else:
            context += count * (start + 1)
    return Work(rows, context, pairs)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The coefficients. row_s: seconds at each of `ROWS`; error: median of |predicted / measured − 1|."""

    row_s: tuple[float, ...]
    context_s: float
    pair_s: float
    error: float

    def seconds(self, work: Work) -> float:
        """Return the seconds of a step."""
        return float(np.interp(work.rows, ROWS, self.row_s)) + work.context * self.context_s + work.pairs * self.pair_s


def measure(model: str, num_threads: int) -> tuple[StepTimes, EngineConfig]:
    """Measure steps of a model in a process that may use `num_threads` cores; returns the engine's config too."""
    cpus = sorted(os.sched_getaffinity(0))[:num_threads]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=os.sched_setaffinity, initargs=(0, cpus)) as pool:
        samples, config = pool.submit(_sample, model).result()
    return fit(samples), config


def fit(samples: list[tuple[Work, float]]) -> StepTimes:
    """Return the coefficients that fit measured steps, given as work and seconds."""
    hats = np.eye(len(ROWS))
    rows = np.array([work.rows for work, _ in samples], float)
    shares = np.stack([np.interp(rows, ROWS, hat) for hat in hats], axis=1)
    others = np.array([(work.context, work.pairs) for work, _ in samples], float)
    seconds = np.array([taken for _, taken in samples])
    features = np.concatenate([shares, others], axis=1) / seconds[:, None]
    scale = np.maximum(features.max(axis=0), 1e-30)
    found = scipy.optimize.nnls(features / scale, np.ones(len(samples)))[0] / scale
    times = StepTimes(tuple(map(float, found[: len(ROWS)])), float(found[-2]), float(found[-1]), 0.0)
    error = statistics.median(abs(times.seconds(work) / taken - 1) for work, taken in samples)
    return StepTimes(times.row_s, times.context_s, times.pair_s, error)


def _sample(model: str) -> tuple[list[tuple[Work, float]], EngineConfig]:
    """Run steps of all shapes; each sample is the median of its repeats."""
    engine = LLMEngine.from_options(
        model, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False, multi_step_decode=1,
        performance_mode="throughput", max_num_batched_tokens=2048,
    )  # fmt: skip
    taken: dict[Work, list[float]] = {}
    last: list[SchedulerOutput] = []

    def note(output: SchedulerOutput, _: StepResult) -> None:
        last[:] = [output]

    engine.watch(note)
    choose = random.Random(1)
    for _ in range(NUM_REPEATS):
        for number, length, generated in [(*case, NUM_STEPS) for case in DECODES] + [(*case, 1) for case in PROMPTS]:
            for index in range(number):
                prompt = choose.choices(range(100, 10_000), k=length)
                params = SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True)
                engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params)
            while engine.has_unfinished_requests():
                engine.step()
                duration_s = engine.events.of(EventKind.STEP)[-1].data["duration_s"]
                taken.setdefault(work_of(last[0]), []).append(duration_s)
    config = engine.config
    engine.shutdown()
    return [(work, statistics.median(values)) for work, values in taken.items() if len(values) > 1], config
