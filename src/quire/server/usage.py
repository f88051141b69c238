"""Costs of a request in answers: OpenAI's `usage` and llama.cpp's `timings`.

Next to read: `routes/job.py`.
"""

from typing import Any

from quire.engine.process.messages import RequestUpdate


def usage(num_prompt: int, num_generated: int, num_cached: int, num_truncated: int = 0) -> dict[str, Any]:
    """Return OpenAI's `usage`. `num_truncated` tokens of the prompt were cut off and are not in `num_prompt`."""
    details = {"cached_tokens": num_cached}
    if num_truncated:
        details["truncated_tokens"] = num_truncated
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": details,
    }


def timings(num_prompt: int, num_generated: int, last: RequestUpdate) -> dict[str, Any] | None:
    """Return llama.cpp's `timings` of a finished request; None if its times are unknown.

    `prompt_ms` is from the first step of the request to its first token, `predicted_ms` from there to the last one.
    Units: `_ms` milliseconds; `_per_second` tokens per second, 0 if the time is 0.
    """
    metrics = last.metrics
    if metrics is None or metrics.first_token_time_s is None or metrics.last_token_time_s is None:
        return None
    start_s = metrics.arrival_time_s if metrics.first_scheduled_time_s is None else metrics.first_scheduled_time_s
    num_computed = num_prompt - last.num_cached_tokens
    prompt_ms = max(0.0, (metrics.first_token_time_s - start_s) * 1e3)
    predicted_ms = max(0.0, (metrics.last_token_time_s - metrics.first_token_time_s) * 1e3)
    return {
        "cache_n": last.num_cached_tokens,
        **_speed("prompt", num_computed, prompt_ms),
        **_speed("predicted", num_generated, predicted_ms),
    }


def _speed(name: str, num_tokens: int, duration_ms: float) -> dict[str, Any]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": duration_ms,
        f"{name}_per_token_ms": duration_ms / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens * 1e3 / duration_ms if duration_ms else 0.0,
    }
