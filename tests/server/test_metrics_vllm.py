from quire.engine.process.messages import Statistics
from quire.server.metrics_vllm import vllm_metrics

COMMON = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket",
}  # fmt: skip


def test_the_common_names_are_there_with_vllms_labels() -> None:
    samples = [item for family in vllm_metrics(Statistics(num_finished={"stop": 2}), "m") for item in family.samples]
    assert {sample.name for sample in samples} >= COMMON
    assert all(sample.labels["model_name"] == "m" and sample.labels["engine"] == "0" for sample in samples)


def test_the_values_are_quires() -> None:
    statistics = Statistics(num_running=3, num_blocks=10, num_free_blocks=5, num_finished={"stop": 2})
    found = {sample.name: sample.value for family in vllm_metrics(statistics, "m") for sample in family.samples}
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert found["vllm:request_success_total"] == 2
