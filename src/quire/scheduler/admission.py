"""Refuses settings that contradict each other and requests larger than the engine. Errors say what would fit.

Pure checks, made before anything is queued. Next to read: `scheduler.py`.
"""

from collections.abc import Mapping

from quire.config import SchedulerConfig
from quire.errors import (
    ConfigError,
    ContextLengthError,
    DuplicateRequestError,
    InvalidParameterError,
    MemoryCapacityError,
    PromptError,
    QueueFullError,
)
from quire.scheduler.blocks import BlockManager
from quire.scheduler.request_table import SORT_KEYS
from quire.types import Request


def check_config(config: SchedulerConfig) -> None:
    """Raise ConfigError if the settings cannot work together."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size",
                 "max_num_partial_prefills", "max_long_partial_prefills", "multi_step_decode",
                 "max_in_flight"):  # fmt: skip
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} is not a positive integer")
    if config.num_blocks < 2:
        raise ConfigError(f"num_blocks={config.num_blocks} leaves no KV block: at least 2, one is the null block")
    if not config.kv_cache_groups:
        raise ConfigError("kv_cache_groups is empty: a model has at least one KV cache group")
    if config.policy not in SORT_KEYS:
        raise ConfigError(f"scheduling_policy={config.policy!r} is not one of {', '.join(SORT_KEYS)}")
    if config.enable_chunked_prefill:
        return
    if config.max_num_batched_tokens < config.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} is below max_model_len={config.max_model_len}, so "
            f"long prompts could never run without chunked prefill; set max_num_batched_tokens to at least "
            f"{config.max_model_len}, max_model_len to at most {config.max_num_batched_tokens}, or chunk prompts"
        )
    if config.long_prefill_token_threshold:
        raise ConfigError(
            f"long_prefill_token_threshold={config.long_prefill_token_threshold} splits prompts, which needs "
            "enable_chunked_prefill; set it to 0 or enable chunked prefill"
        )


def check_queue_room(num_waiting: int, config: SchedulerConfig) -> None:
    """Raise QueueFullError if no further request may wait."""
    if config.max_num_waiting is not None and num_waiting >= config.max_num_waiting:
        raise QueueFullError(
            f"{num_waiting} requests are waiting, max_num_waiting is {config.max_num_waiting}; try again later"
        )


def check_request(
    request: Request, config: SchedulerConfig, blocks: BlockManager, unfinished: Mapping[str, Request]
) -> None:
    """Raise unless the request, with its siblings, can be accepted and run to its end."""
    seen: set[str] = set()
    for item in (request, *request.siblings):
        if item.request_id in unfinished or item.request_id in seen:
            raise DuplicateRequestError(f"request id '{item.request_id}' is already running; choose another")
        seen.add(item.request_id)
        if item.prompt_token_ids != request.prompt_token_ids:
            raise PromptError(f"sibling '{item.request_id}' has another prompt than '{request.request_id}'")
    if not request.prompt_token_ids:
        raise PromptError(f"request '{request.request_id}' has an empty prompt; it needs at least one token")
    if len(seen) > config.max_num_seqs:
        raise InvalidParameterError("n", len(seen), f"at most max_num_seqs ({config.max_num_seqs})")
    for item in (request, *request.siblings):
        room = 0 if item.sampling is None else 1
        if item.num_tokens + room > config.max_model_len:
            raise ContextLengthError(
                f"request '{item.request_id}' has {item.num_tokens} prompt tokens, max_model_len is "
                f"{config.max_model_len}; at most {config.max_model_len - room} fit"
            )
        num_generated = 0 if item.sampling is None else item.max_tokens
        check_sequence_fits(item, min(item.num_prompt_tokens + num_generated, config.max_model_len), config, blocks)


def check_sequence_fits(request: Request, num_tokens: int, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Raise MemoryCapacityError if a sequence of `num_tokens` needs more blocks than there are.

    Siblings are not added up: they may run one after another. The last token generated is never computed.
    """
    num_computed = num_tokens if request.sampling is None else num_tokens - 1
    num_needed = blocks.peak_blocks(num_computed)
    if num_needed <= blocks.pool.num_usable:
        return
    longest = blocks.longest_sequence() + num_tokens - num_computed
    prompt_len = request.num_prompt_tokens
    if longest > prompt_len:
        advice = f"max_tokens={longest - prompt_len} fits"
    else:
        advice = f"a prompt of {max(0, longest - num_tokens + num_computed)} tokens fits"
    raise MemoryCapacityError(
        f"request '{request.request_id}' needs {num_needed} KV blocks of {config.block_size} tokens for "
        f"{prompt_len} prompt + {num_tokens - prompt_len} generated tokens, the cache has {blocks.pool.num_usable}, "
        f"{num_needed - blocks.pool.num_usable} too few; {advice}, or give the cache more (kv_cache_memory_bytes)"
    )
