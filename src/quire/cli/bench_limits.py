"""The roofline of `quire bench`: the most tokens per second that memory and arithmetic of this machine allow.

    decode of R streams: a step reads all weights once and each stream's KV, and multiplies every weight R times
    prompt of T tokens: every weight but the head's T times, and T²/2 attention scores per query head, twice
    limit = tokens / max(bytes / read bandwidth, sum over arithmetics of operations / rate)  (Williams 2009, "Roofline")

Knows no tensors: the rates come from `runtime/machine_limits.py`. Next to read: `bench.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cli.bench_cases import BenchCase
from quire.config import DTYPES, EngineConfig

if TYPE_CHECKING:
    from quire.runtime.machine_limits import MachineLimits

PLANNED = {"float32": "fp32", "float16": "fp32", "bfloat16": "bf16", "int8": "int8"}
"""The arithmetic of plans by the type of weights or keys: fp16 is widened."""
OP_BY_OP = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Work:
    """The least work of one step of a case. `num_tokens`: tokens it computes; `num_flops`: by arithmetic."""

    num_tokens: int
    num_bytes: float
    num_flops: Mapping[str, float]


def arithmetics(config: EngineConfig) -> tuple[str, str]:
    """The arithmetic that products with weights run in, and that of attention."""
    if not config.uses_plan:
        return OP_BY_OP[config.dtype], OP_BY_OP[config.dtype]
    is_quantised = config.weight_bytes < config.model.num_parameters * DTYPES[config.dtype]
    return PLANNED["int8" if is_quantised else config.dtype], PLANNED[config.kv_dtype]


def work_of(case: BenchCase, config: EngineConfig) -> Work:
    """A decode step in the middle of the generation, or the whole prompt as one step."""
    model = config.model
    head = model.vocab_size * model.hidden_size
    is_tied = bool(model.hf_config.get("tie_word_embeddings", False))
    in_layers = model.num_parameters - head * (1 if is_tied else 2)
    # An embedding that is not the head is looked up, not read.
    num_bytes = config.weight_bytes * (in_layers + head) / model.num_parameters
    kv_bytes_per_token = config.options.tensor_parallel_size * sum(  # the groups are those of a rank
        len(group.layer_indices) * group.spec.bytes_per_token for group in config.scheduler.kv_cache_groups
    )
    attention_width = model.num_layers * model.num_heads * model.head_size
    if case.num_generated == 0:
        num_tokens = case.num_prompt
        products = in_layers * num_tokens + head
        scores = attention_width * num_tokens**2 / 2
    else:
        num_tokens = case.num_streams
        context_len = case.num_prompt + case.num_generated / 2
        num_bytes += num_tokens * context_len * kv_bytes_per_token
        products = (in_layers + head) * num_tokens
        scores = num_tokens * attention_width * context_len
    of_weights, of_scores = arithmetics(config)
    flops = {of_weights: 2.0 * products}
    flops[of_scores] = flops.get(of_scores, 0.0) + 4 * scores
    return Work(num_tokens, num_bytes, flops)


def tokens_per_s_limit(case: BenchCase, config: EngineConfig, limits: "MachineLimits") -> float:
    """Tokens per second at the roofline."""
    work = work_of(case, config)
    multiply_s = sum(flops / limits.flops_per_s[name] for name, flops in work.num_flops.items())
    return work.num_tokens / max(work.num_bytes / limits.read_bytes_per_s, multiply_s)
