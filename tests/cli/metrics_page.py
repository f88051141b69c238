"""A page of metrics for tests of `top` and `ps`."""

from typing import Any


def page(*, tokens: int = 0, requests: int = 0, hits: int = 0, queries: int = 0, slow: int = 0, **gauges: Any) -> str:
    """`requests` had their first token within 0.1 s, but `slow` of them between 0.1 and 0.5 s."""
    fast = requests - slow
    lines = [
        "# HELP quire_build_info Version and model",
        'quire_build_info{model="ti\\"ny",version="0.1"} 1.0',
        f"quire_requests_running {gauges.get('running', 0)}",
        f"quire_requests_waiting {gauges.get('waiting', 0)}",
        f"quire_kv_usage_ratio {gauges.get('kv', 0.0)}",
        f"quire_generation_tokens_total {tokens}",
        f"quire_prompt_tokens_total {2 * tokens}",
        f'quire_requests_total{{finish_reason="stop"}} {fast}',
        f'quire_requests_total{{finish_reason="length"}} {slow}',
        f"quire_prefix_cache_queries_total {queries}",
        f"quire_prefix_cache_hits_total {hits}",
        f'quire_time_to_first_token_seconds_bucket{{le="0.1"}} {fast}',
        f'quire_time_to_first_token_seconds_bucket{{le="0.5"}} {requests}',
        f'quire_time_to_first_token_seconds_bucket{{le="+Inf"}} {requests}',
        f"quire_preemptions_total {gauges.get('preemptions', 0)}",
        f"quire_engine_deaths_total {gauges.get('deaths', 0)}",
    ]
    return "\n".join(lines) + "\n"
