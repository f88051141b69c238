"""Small configs for tests of the runtime."""

from collections.abc import Mapping
from typing import Any

from quire.cache_spec import CacheGroup
from quire.config import EngineConfig, EngineOptions, Hardware, ModelConfig, SchedulerConfig


def make_config(
    *,
    kv_cache_groups: tuple[CacheGroup, ...],
    num_blocks: int = 64,
    block_size: int = 4,
    device: str = "cpu",
    dtype: str = "float32",
    max_model_len: int = 128,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    hf_config: Mapping[str, Any] | None = None,
    vocab_size: int = 50,
    options: EngineOptions | None = None,
    enable_prefix_caching: bool = True,
    multi_step_decode: int = 3,
) -> EngineConfig:
    """Return an `EngineConfig` that never went through `resolve`."""
    model = ModelConfig(
        architecture="LlamaForCausalLM", hf_config=hf_config or {}, vocab_size=vocab_size, hidden_size=8, num_layers=1,
        num_heads=1, num_kv_heads=1, head_size=8, context_len=max_model_len, num_parameters=1,
        cache_specs=(),
    )  # fmt: skip
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_groups=kv_cache_groups,
        enable_prefix_caching=enable_prefix_caching,
        multi_step_decode=multi_step_decode,
    )
    hardware = Hardware(device, 2**33, 2**33, has_fast_bfloat16=False, num_threads=1)
    return EngineConfig(options or EngineOptions(), model, hardware, device, dtype, dtype, scheduler, ())
