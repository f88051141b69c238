"""What a step takes beside weights and KV cache, and what stays reserved for libraries. Pure arithmetic on integers.

Upper estimates: memory that was promised to the KV cache must not be missing in service. Next to read: `resolve.py`.
"""

from quire.config import DTYPES, EngineOptions, ModelConfig

CPU_RESERVE_BYTES = 64 * 2**20
"""Tokenizers here and in the server, threads, and what libraries allocate with the first step; measured: 50 MiB."""
GPU_RESERVE_BYTES = 512 * 2**20
"""CUDA context, cuBLAS workspaces and allocator fragmentation."""

PROMPT_LOGPROB_ROWS = 256
"""Logits of so many prompt positions exist at once: 2,000 positions × 128k vocabulary in fp32 would be 1 GB."""


def bytes_beside(options: EngineOptions, model: ModelConfig, device: str, dtype: str, num_tokens: int) -> int:
    """Reserve and activations of a step of `num_tokens` on this device."""
    if device == "cpu":
        return CPU_RESERVE_BYTES + _cpu_step_bytes(options, model, num_tokens)
    return GPU_RESERVE_BYTES + _gpu_step_bytes(options, model, dtype, num_tokens)


def _cpu_step_bytes(options: EngineOptions, model: ModelConfig, num_tokens: int) -> int:
    # All in fp32. A plan, whose buffers share memory by lifetime, takes about half of what is counted per token.
    per_token = 2 * model.hidden_size + max(_attention_width(model), 2 * _mlp_size(model))
    # Logits, and as much again in the sampler.
    per_row = 2 * model.vocab_size
    return 4 * (num_tokens * per_token + max(options.max_num_seqs, PROMPT_LOGPROB_ROWS) * per_row)


def _gpu_step_bytes(options: EngineOptions, model: ModelConfig, dtype: str, num_tokens: int) -> int:
    per_token = (4 * model.hidden_size + _attention_width(model) + 3 * _mlp_size(model)) * DTYPES[dtype]
    # Logits in the compute type and fp32, and as much again inside the sampler.
    per_row = model.vocab_size * (DTYPES[dtype] + 3 * 4)
    return num_tokens * per_token + options.max_num_seqs * per_row


def _attention_width(model: ModelConfig) -> int:
    return (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_size


def _mlp_size(model: ModelConfig) -> int:
    return int(model.hf_config.get("intermediate_size") or model.hf_config.get("ffn_dim") or 4 * model.hidden_size)
