"""Goodput of replicas under a latency objective, predicted by simulation: `docs/scaling.md` explains the tables.

    python -m benchmarks.cluster [--model smollm2] [--objective 0.5,0.05] [--measured] [--json FILE]

Step times of one core are measured first; all tables follow from them. `--measured`: servers with one and two replicas
are run too, a core each, under the load that was simulated. Next to read: `simulate.py`.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.simulate import Cluster, Job, Objective, attainment, capacity, poisson_trace
from benchmarks.cluster.step_times import ROWS, StepTimes, measure
from benchmarks.command_line import cpu_name
from benchmarks.server_process import ServerProcess, quire_serve
from quire.config import EngineConfig, SchedulerConfig
from quire_workshop.cli.bench_serve import Bodies
from quire_workshop.load_client import Load, LoadTarget, percentile, put_load

WINDOW_S = 40.0
CHAT = {"prompt_len": 146, "num_generated": 128}
NUM_PREFIXES, PREFIX_LEN, OWN_LEN = 200, 512, 64
SHARED = {"prompt_len": OWN_LEN, "num_generated": 64, "num_shared": NUM_PREFIXES, "shared_len": PREFIX_LEN}
WORKLOADS = {
    "prompt 1,024, answer 32": (1024, 32),
    "prompt 256, answer 128": (256, 128),
    "prompt 64, answer 256": (64, 256),
}
KV_BYTES_PER_S = 1.25e9  # a network of 10 Gbit/s between prefill and decode
MEASURED_S = 40


def served(config: EngineConfig, **changes: Any) -> SchedulerConfig:
    """Return the scheduler's config of `quire serve`."""
    interactive = {"enable_prefix_caching": True, "multi_step_decode": 8, "prefill_tokens_per_decode": 2}
    return replace(config.scheduler, **{**interactive, **changes})


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table."""
    print(f"\n## {title}\n\n| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(f'{cell:.3g}' if isinstance(cell, float) else str(cell) for cell in row)} |", flush=True)


def summary(jobs: Sequence[Job]) -> dict[str, float]:
    """Return what a load client would measure: milliseconds, and tokens per second until the last answer."""
    ttft = [1000 * job.ttft_s for job in jobs]
    duration_s = max(job.last_s for job in jobs) - min(job.arrival_s for job in jobs)
    return {
        "ttft_p50": percentile(ttft, 50), "ttft_p95": percentile(ttft, 95),
        "token_ms": 1000 * statistics.median(job.token_s for job in jobs),
        "tokens_per_s": sum(job.num_generated for job in jobs) / duration_s,
    }  # fmt: skip


def replicas_table(times: StepTimes, config: SchedulerConfig, objective: Objective) -> list[list[Any]]:
    """Capacity of N replicas with each policy, on prompts that share prefixes."""
    rows: list[list[Any]] = []
    for number in (1, 2, 4, 8):
        row: list[Any] = [number]
        for policy in ("round-robin", "least-loaded", "prefix"):

            def simulate(rate: float, number: int = number, policy: str = policy) -> list[Job]:
                trace = poisson_trace(rate, WINDOW_S, **SHARED)
                return Cluster.build(times, config, number, policy=policy).run(trace)

            best = capacity(simulate, objective)
            jobs = simulate(best)
            row += [best, sum(job.num_cached for job in jobs) / max(1, sum(len(job.prompt) for job in jobs))]
        rows.append(row)
    return rows


def ratio_table(times: StepTimes, config: SchedulerConfig, objective: Objective, kv_bytes: int) -> list[list[Any]]:
    """Capacity of four replicas by how many of them only prefill, for three mixes of prompt and answer."""
    rows: list[list[Any]] = []
    for name, (prompt_len, num_generated) in WORKLOADS.items():
        row: list[Any] = [name]
        for num_prefill in (0, 1, 2, 3):

            def simulate(
                rate: float, num_prefill: int = num_prefill, lengths: tuple[int, int] = (prompt_len, num_generated)
            ) -> list[Job]:
                cluster = Cluster.build(
                    times, config, num_prefill or 4, num_decode=4 - num_prefill if num_prefill else 0,
                    policy="least-loaded", handover_s=kv_bytes / KV_BYTES_PER_S,
                )  # fmt: skip
                return cluster.run(poisson_trace(rate, WINDOW_S, prompt_len=lengths[0], num_generated=lengths[1]))

            row.append(capacity(simulate, objective))
        rows.append(row)
    return rows


def diurnal_table(times: StepTimes, config: SchedulerConfig, objective: Objective, *, peak: float) -> list[list[Any]]:
    """Replicas that each hour of a day needs: traffic is a sine, a fifth of the peak at 4:00, the peak at 16:00."""
    rows: list[list[Any]] = []
    number = 1
    for hour in range(0, 24, 2):
        rate = peak * (0.6 - 0.4 * math.cos(2 * math.pi * (hour - 4) / 24))
        trace = dict(rate=rate, duration_s=WINDOW_S, **CHAT)
        number = max(1, number - 2)
        while True:
            jobs = Cluster.build(times, config, number, policy="least-loaded").run(poisson_trace(**trace))
            if attainment(jobs, objective) >= 0.95:
                break
            number += 1
        rows.append([f"{hour}:00", rate, number, attainment(jobs, objective)])
    return rows


@contextmanager
def confined(num_cpus: int) -> Iterator[None]:
    """Let processes that start meanwhile use the first cores only."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cpus)[:num_cpus])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def same_arrivals(rate: float, number: int, prompt_len: float) -> list[Job]:
    """Return requests that come when those of `put_load` with seed 1 do."""
    gaps = random.Random(1)
    arrivals = [0.0, *itertools.accumulate(gaps.expovariate(rate) for _ in range(number - 1))]
    return [
        Job(at_s, [1_000_000 + 1000 * index + item for item in range(int(prompt_len))], CHAT["num_generated"])
        for index, at_s in enumerate(arrivals)
    ]


def front_end_s(server: ServerProcess, num_replicas: int) -> float:
    """Return processor seconds of the server's processes without engines, and of this one if it shares their cores."""
    others = [item for item in server.processes() if "quire.engine.process.child" not in item.cmdline()]
    own_s = time.process_time() if num_replicas == len(os.sched_getaffinity(0)) else 0.0
    return own_s + sum(sum(item.cpu_times()[:2]) for item in others)


def measured_table(model: str, times: StepTimes, config: SchedulerConfig, rates: Sequence[float]) -> list[list[Any]]:
    """Measure one and two local replicas, a core each, and simulate the same load."""
    rows: list[list[Any]] = []
    for number in (1, 2):
        parallel = ("--data-parallel-size", str(number)) if number > 1 else ()
        with confined(number):
            server = ServerProcess(quire_serve(model, "--max-model-len", "2048", *parallel, name="simulated"))
        try:
            endpoint = LoadTarget(server.url, "/v1/chat/completions")
            bodies = Bodies("simulated", 100, CHAT["num_generated"], seed=1, temperature=0)
            put_load(endpoint, Load(concurrency=2 * number), bodies.take(8 * number), seed=1)
            for rate in (number * rate for rate in rates):
                bodies_of_rate = bodies.take(int(MEASURED_S * rate))
                before_s = front_end_s(server, number)
                found = put_load(endpoint, Load(rate=rate), bodies_of_rate, seed=1)
                front_s = (front_end_s(server, number) - before_s) / sum(answer.num_tokens for answer in found.good)
                trace = same_arrivals(rate, len(bodies_of_rate), statistics.median(
                    answer.num_prompt_tokens for answer in found.good))  # fmt: skip
                expected = summary(Cluster.build(times, config, number, front_s=front_s).run(trace))
                per_token = [
                    (answer.chunk_times[-1] - answer.chunk_times[0]) / (answer.num_tokens - 1) for answer in found.good
                ]
                seen = {
                    "ttft_p50": found.percentile_ms("ttft", 50), "ttft_p95": found.percentile_ms("ttft", 95),
                    "token_ms": 1000 * statistics.median(per_token), "tokens_per_s": found.tokens_per_s,
                }  # fmt: skip
                rows.append(
                    [number, rate, 1e6 * front_s, *(f"{expected[name]:.0f} / {seen[name]:.0f}" for name in expected)]
                )
        finally:
            server.kill()
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--objective", default="0.5,0.05", help="seconds to the first token, between tokens  [%(default)s]"
    )
    parser.add_argument("--peak", type=float, default=40.0, help="requests per second of the day's peak  [%(default)s]")
    parser.add_argument("--measured", action="store_true", help="run servers beside the simulation")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(words)
    objective = Objective(*map(float, options.objective.split(",")))
    times, engine = measure(options.model, 1)
    config = served(engine)
    print(f"{cpu_name()}, {options.model}, one core per replica; {engine.dtype}, fit within {times.error:.1%}")
    tables: dict[str, tuple[list[str], list[list[Any]]]] = {
        "Step times": (["rows", *map(str, ROWS)], [["ms", *(1000 * value for value in times.row_s)]])
    }

    def add(title: str, header: list[str], rows: list[list[Any]]) -> None:
        tables[title] = (header, rows)
        show(title, header, rows)

    show("Step times", *tables["Step times"])
    if options.measured:
        header = [
            "replicas",
            "requests/s",
            "front end µs per token",
            *(f"{name}, simulated / measured" for name in ("TTFT p50 ms", "TTFT p95 ms", "ms per token", "tokens/s")),
        ]
        add("Simulated beside measured", header, measured_table(options.model, times, config, (1.0, 3.0)))
    small = replace(config, num_blocks=24 * PREFIX_LEN // config.block_size * 2)
    header = [
        "replicas",
        *(
            f"{policy}: {what}"
            for policy in ("round-robin", "least-loaded", "prefix")
            for what in ("requests/s", "hit rate")
        ),
    ]
    add("Replicas and policies", header, replicas_table(times, small, objective))
    kv_bytes = sum(group.page_bytes(config.block_size) for group in config.kv_cache_groups) // config.block_size
    add(
        "Prefill and decode apart: requests/s of four replicas",
        ["workload", "4 do both", "1 + 3", "2 + 2", "3 + 1"],
        ratio_table(times, config, objective, kv_bytes),
    )
    add(
        "A day",
        ["hour", "requests/s", "replicas", "share within the objective"],
        diurnal_table(times, config, objective, peak=options.peak),
    )
    if options.json:
        options.json.write_text(
            json.dumps({"cpu": cpu_name(), "model": options.model, "tables": tables}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
