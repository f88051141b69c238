"""Metrics against a known load, over the wire; the number of labels is bounded."""

import asyncio
import time

from prometheus_client.parser import text_string_to_metric_families

from quire.engine.process.messages import Histogram, Statistics
from quire.server.keys import KeyRing
from quire.server.metrics import engine_metrics
from tests.server.fake_engine import in_loop, until
from tests.server.served import CHAT, Served, make_state, serving


async def samples(served: Served) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Everything at /metrics."""
    text = (await served.answer("GET", "/metrics")).body.decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@in_loop
async def test_known_load_gives_known_metrics() -> None:
    async with serving(metrics_names="vllm") as served:
        usage = [(await served.chat(max_tokens=6, ignore_eos=True, stream=False)).json["usage"] for _ in range(5)]
        await served.chat(max_tokens=6, ignore_eos=True, stream=True)
        await served.until_idle()
        found = await samples(served)
    num_prompt = sum(item["prompt_tokens"] for item in usage) + usage[0]["prompt_tokens"]
    num_cached = sum(item["prompt_tokens_details"]["cached_tokens"] for item in usage)
    assert value(found, "quire_prompt_tokens_total") == num_prompt
    assert value(found, "quire_generation_tokens_total") == 36
    assert value(found, "quire_requests_total", finish_reason="length") == 6
    assert value(found, "quire_prefix_cache_queries_total") == num_prompt
    assert value(found, "quire_prefix_cache_hits_total") == num_cached + 0
    assert value(found, "quire_request_seconds_count") == 6
    assert value(found, "quire_time_to_first_token_seconds_count") == 6
    assert value(found, "quire_inter_token_latency_seconds_count") == 30
    assert value(found, "quire_queue_seconds_count") == 6
    assert value(found, "quire_requests_running") == value(found, "quire_requests_waiting") == 0
    blocks = [value(found, "quire_kv_blocks", state=state) for state in ("used", "cached", "free")]
    assert (blocks[0], sum(blocks)) == (0, 199)
    assert value(found, "quire_kv_usage_ratio") == 0
    steps = [value(found, "quire_step_duration_seconds_count", kind=kind) for kind in ("prefill", "decode")]
    assert sum(steps) == value(found, "quire_steps_total") == 36
    assert value(found, "quire_http_requests_total", method="POST", route=CHAT, status="200") == 6
    assert value(found, "quire_http_request_seconds_count", route=CHAT) == 6
    assert value(found, "vllm:generation_tokens_total", model_name="scripted", engine="0") == 36


@in_loop
async def test_running_and_waiting_requests_are_counted() -> None:
    async with serving(scheduler={"max_num_seqs": 2}) as served:
        served.executor.in_step = lambda step: time.sleep(0.02)
        chats = [asyncio.create_task(served.chat(max_tokens=40, ignore_eos=True)) for _ in range(5)]
        client = served.supervisor.the_client
        async with asyncio.timeout(20):
            while served.server_requests() < 5 or client.statistics.num_waiting < 3:
                await asyncio.sleep(0.005)
        found = await samples(served)
        assert value(found, "quire_requests_running") == 2
        assert value(found, "quire_requests_waiting") == 3
        assert value(found, "quire_admitted_requests") == 5
        assert 0 < value(found, "quire_kv_usage_ratio") < 1
        served.executor.in_step = lambda step: None
        await asyncio.gather(*chats)


@in_loop
async def test_refusals_and_engine_deaths_are_counted() -> None:
    async with serving(requests_per_minute=1) as served:
        await served.chat()
        await served.chat()
        served.supervisor.num_deaths = 2
        found = await samples(served)
        assert value(found, "quire_refused_requests_total", reason="rate_limit_exceeded") == 1
        assert value(found, "quire_engine_deaths_total") == 2
        assert value(found, "quire_engine_up") == 1


@in_loop
async def test_paths_and_methods_of_clients_make_no_labels() -> None:
    async with serving(keys=KeyRing({"k": None})) as served:
        bearer = {"Authorization": "Bearer k"}
        for number in range(60):
            await served.answer(f"M{chr(65 + number % 26)}" if number % 2 else "GET", f"/{number}", headers=bearer)
            await served.answer("GET", f"/{number}")
        text = (await served.answer("GET", "/metrics", headers=bearer)).body.decode()
        assert len([line for line in text.splitlines() if line.startswith("quire_http_requests_total{")]) < 10


@in_loop
async def test_lag_of_the_event_loop_is_measured() -> None:
    metrics = make_state().metrics
    metrics.watch_loop()
    metrics.watch_loop()
    none = b"quire_event_loop_lag_seconds_count 0.0"
    assert none in metrics.render()
    await until(lambda: none not in metrics.render())


def test_counters_with_labels_begin_at_0() -> None:
    """Else the first refusal of a server's life raises no alert: a rate needs two values."""
    text = make_state().metrics.render().decode()
    for reason in ("queue_full", "rate_limit_exceeded", "too_many_completions"):
        assert f'quire_refused_requests_total{{reason="{reason}"}} 0.0' in text
    for reason in ("stop", "length", "abort", "error"):
        assert f'quire_requests_total{{finish_reason="{reason}"}} 0.0' in text


VLLM_NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket",
}  # fmt: skip


def test_vllm_names_have_vllm_labels_and_the_same_values() -> None:
    statistics = Statistics(num_running=3, num_blocks=10, num_free_blocks=5, num_finished={"stop": 2})
    found = [sample for family in engine_metrics(statistics, "m") for sample in family.samples]
    vllm = [sample for sample in found if sample.name.startswith("vllm:")]
    assert {sample.name for sample in vllm} >= VLLM_NAMES
    assert all(sample.labels["model_name"] == "m" and sample.labels["engine"] == "0" for sample in vllm)
    values = {(sample.name, sample.labels.get("finished_reason")): sample.value for sample in vllm}
    assert values["vllm:num_requests_running", None] == 3
    assert values["vllm:kv_cache_usage_perc", None] == 0.5
    assert values["vllm:request_success_total", "stop"] == 2


def test_right_drafts_are_counted_by_position_under_both_names() -> None:
    statistics = Statistics(num_drafts=4, num_draft_tokens=9, num_accepted_tokens=5, num_accepted_at=[3, 2])
    found = [sample for family in engine_metrics(statistics, "m") for sample in family.samples]
    for name in ("quire_accepted_tokens_per_position_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"):
        counts = {sample.labels["position"]: sample.value for sample in found if sample.name == name}
        assert counts == {"0": 3, "1": 2}
    values = {sample.name: sample.value for sample in found}
    assert values["quire_drafts_total"] == values["vllm:spec_decode_num_drafts_total"] == 4


def test_histogram_buckets_are_cumulative() -> None:
    statistics = Statistics(histograms={"queue": Histogram([3, 0, *[0] * 16, 4], 20.5)})
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in engine_metrics(statistics)
        for sample in family.samples
    }
    wanted = {
        ("bucket", "0.005"): 3,
        ("bucket", "0.01"): 3,
        ("bucket", "+Inf"): 7,
        ("count", None): 7,
        ("sum", None): 20.5,
    }
    assert {(name, le): found[f"quire_queue_seconds_{name}", le] for name, le in wanted} == wanted
