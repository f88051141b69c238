"""The simulation behind `docs/scaling.md`: its step times, its clock, its policies."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.cluster.simulate import Cluster, Job, Objective, attainment, capacity, poisson_trace
from benchmarks.cluster.step_times import ROWS, StepTimes, Work, fit
from tests.scheduler.builders import make_config

TIMES = StepTimes(tuple(0.01 + 0.001 * rows for rows in ROWS), context_s=1e-6, pair_s=1e-7, error=0.0)
CONFIG = make_config(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=1024, block_size=16, num_blocks=400)


def test_fit_finds_the_coefficients_of_measured_steps() -> None:
    works = [Work(rows, context, pairs) for rows, context, pairs in itertools.product(ROWS, (0, 900), (0, 5000))]
    found = fit([(work, TIMES.seconds(work)) for work in works])
    assert found.row_s == pytest.approx(TIMES.row_s)
    assert (found.context_s, found.pair_s) == pytest.approx((TIMES.context_s, TIMES.pair_s))
    assert found.error < 1e-6


def test_request_alone_takes_the_times_of_its_steps() -> None:
    (job,) = Cluster.build(TIMES, CONFIG, 1).run([Job(2.0, list(range(100)), 5)])
    decodes = [TIMES.seconds(Work(1, 101 + index, 0)) for index in range(4)]
    assert job.ttft_s == pytest.approx(TIMES.seconds(Work(100, 0, 5050)))
    assert job.last_s - job.first_s == pytest.approx(sum(decodes))


def test_front_end_keeps_the_core_from_the_next_step() -> None:
    (job,) = Cluster.build(TIMES, CONFIG, 1, front_s=0.001).run([Job(2.0, list(range(100)), 5)])
    (alone,) = Cluster.build(TIMES, CONFIG, 1).run([Job(2.0, list(range(100)), 5)])
    assert job.ttft_s == pytest.approx(alone.ttft_s)
    assert job.last_s - job.first_s == pytest.approx(alone.last_s - alone.first_s + 4 * 0.001)


def test_requests_of_one_replica_share_its_steps_and_those_of_two_do_not() -> None:
    def jobs() -> list[Job]:
        return [Job(0.0, [index + 1] * 100, 20) for index in range(2)]

    together, apart = (Cluster.build(TIMES, CONFIG, number, policy="least-loaded").run(jobs()) for number in (1, 2))
    assert apart[0].last_s == apart[1].last_s
    assert max(job.last_s for job in together) > apart[0].last_s


def test_arrival_ends_a_multi_step_decode_after_its_iteration() -> None:
    config = make_config(max_num_seqs=8, max_model_len=256, num_blocks=101, multi_step_decode=8)
    fast = StepTimes(tuple(0.001 * rows for rows in ROWS), context_s=0.0, pair_s=0.0, error=0.0)
    first, second = Cluster.build(fast, config, 1).run([Job(0.0, [1] * 8, 200), Job(0.0103, [2] * 8, 1)])
    assert second.first_s == pytest.approx(0.011 + 0.009)
    assert first.last_s > second.first_s


@pytest.mark.parametrize("handover_s", [0.0, 0.001])
def test_prompts_computed_elsewhere_cost_their_handover_only(handover_s: float) -> None:
    cluster = Cluster.build(TIMES, CONFIG, 1, num_decode=1, handover_s=handover_s)
    (job,) = cluster.run([Job(0.0, list(range(100)), 2)])
    assert job.ttft_s == pytest.approx(TIMES.seconds(Work(100, 0, 5050)))
    assert job.last_s - job.first_s == pytest.approx(100 * handover_s + TIMES.seconds(Work(0, 0, 0)))


def test_prefix_policy_hits_more_than_round_robin() -> None:
    trace = {"prompt_len": 16, "num_generated": 2, "num_shared": 40, "shared_len": 256}
    hits = {}
    small = replace(CONFIG, num_blocks=200)  # of 640 that the prefixes take
    for policy in ("round-robin", "prefix"):
        jobs = Cluster.build(TIMES, small, 2, policy=policy).run(poisson_trace(2.0, 100.0, **trace))
        hits[policy] = sum(job.num_cached for job in jobs)
    assert hits["prefix"] > 1.3 * hits["round-robin"]


def test_capacity_is_the_rate_up_to_which_the_objective_holds() -> None:
    objective = Objective(ttft_s=0.5, token_s=0.05)

    def simulate(rate: float) -> list[Job]:
        trace = poisson_trace(rate, 20.0, prompt_len=50, num_generated=20)
        return Cluster.build(TIMES, CONFIG, 1).run(trace)

    best = capacity(simulate, objective)
    assert attainment(simulate(best), objective) >= 0.95
    assert attainment(simulate(1.3 * best), objective) < 0.95
