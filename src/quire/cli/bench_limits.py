"""The roofline of `quire bench`: the most tokens per second that memory and arithmetic of this machine allow.

    decode of R streams: a step reads all weights once and each stream's KV, and multiplies every weight R times
    prompt of T tokens: every weight but the head's T times, and T²/2 attention scores per query head, twice
    limit = tokens / max(bytes / read bandwidth, operations / matrix rate)       (Williams 2009, "Roofline")

Knows no tensors: the two rates come from `runtime/machine_limits.py`. Next to read: `bench.py`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cli.bench_cases import BenchCase
from quire.config import EngineConfig

if TYPE_CHECKING:
    from quire.runtime.machine_limits import MachineLimits


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of one step of a case. `num_tokens`: tokens that the step computes."""

    num_tokens: int
    num_bytes: float
    num_flops: float


def work_of(case: BenchCase, config: EngineConfig) -> Work:
    """A decode step in the middle of the generation, or the whole prompt as one step."""
    model = config.model
    head = model.vocab_size * model.hidden_size
    is_tied = bool(model.hf_config.get("tie_word_embeddings", False))
    in_layers = model.num_parameters - head * (1 if is_tied else 2)
    # An embedding that is not the head is looked up, not read.
    weight_bytes = config.weight_bytes * (in_layers + head) / model.num_parameters
    kv_bytes_per_token = sum(
        len(group.layer_indices) * group.spec.bytes_per_token for group in config.scheduler.kv_cache_groups
    )
    attention_width = model.num_layers * model.num_heads * model.head_size
    if case.num_generated == 0:
        num_tokens = case.num_prompt
        scores = attention_width * num_tokens**2 / 2
        return Work(num_tokens, weight_bytes, 2 * (in_layers * num_tokens + head + 2 * scores))
    context_len = case.num_prompt + case.num_generated / 2
    kv_bytes = case.num_streams * context_len * kv_bytes_per_token
    scores = case.num_streams * attention_width * context_len
    return Work(case.num_streams, weight_bytes + kv_bytes, 2 * ((in_layers + head) * case.num_streams + 2 * scores))


def tokens_per_s_limit(case: BenchCase, config: EngineConfig, limits: "MachineLimits") -> float:
    """Tokens per second at the roofline."""
    work = work_of(case, config)
    return work.num_tokens / max(work.num_bytes / limits.read_bytes_per_s, work.num_flops / limits.flops_per_s)
