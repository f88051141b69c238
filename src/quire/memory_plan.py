"""Memory plan: bytes of a step, and of what is left the blocks of the KV cache and the context that fits in them.

Pure arithmetic on integers, with the reason for each choice. Estimates of a step are upper ones: memory that was
promised to the KV cache must not be missing in service. Next to read: `cache_spec.py`; `resolve.py`, the caller.
"""

import math
from dataclasses import dataclass, replace

from quire.byte_sizes import format_bytes
from quire.cache_spec import CacheSpec, PoolShape
from quire.config import (
    DEFAULT_MAX_MODEL_LEN_CAP,
    DEFAULT_MAX_NUM_SEQS,
    DTYPES,
    Decision,
    DraftModel,
    EngineConfig,
    EngineOptions,
    Hardware,
    ModelConfig,
    read_share,
    weight_bytes,
)
from quire.errors import ConfigError, MemoryCapacityError

CPU_RESERVE_BYTES = 64 * 2**20
"""Tokenizers here and in the server, threads, and what libraries allocate with the first step; measured: 50 MiB."""
RANK_RESERVE_BYTES = 192 * 2**20
"""Python and libraries of a further rank's process; measured: 150 MiB."""
GPU_RESERVE_BYTES = 512 * 2**20
"""CUDA context, cuBLAS workspaces and allocator fragmentation."""

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions with logits at the same time: those of 2,000 positions × 128k vocabulary in fp32 take 1 GB."""
MAX_DEFAULT_CPU_KV_BYTES = 4 * 2**30
"""A machine that is also used for other things should not lose more than this unasked."""
DEFAULT_TOKENS_PER_SEQUENCE = 256
"""Tokens that a sequence holds on average: chats of a few hundred tokens (ShareGPT's mean is 161 prompt and 338
generated tokens, of which half are there at a time), some of which share a prompt."""
DEFAULT_NUM_CONTEXTS = 4
"""Sequences of full length for which there is room at least."""
DEFAULT_SWAP_BYTES = 4 * 2**30
DEFAULT_DISK_BYTES = 8 * 2**30
MIN_DISK_BLOCKS = 16
"""Fewer would be deleted as soon as a prompt is written."""
_MORE = "; --kv-cache-memory-bytes for more"


@dataclass(frozen=True, slots=True)
class WantedLen:
    """Context length before it is known to fit."""

    value: int
    reason: str
    chosen_by_user: bool


def wanted_model_len(options: EngineOptions, model: ModelConfig) -> WantedLen:
    """The length that `max_model_len`, or the model's context, asks for. Raises: ConfigError if it is too long."""
    context, chosen = model.context_len, options.max_model_len
    if chosen is not None:
        if chosen > context:
            raise ConfigError(
                f"max_model_len={chosen} is above the model's context of {context} tokens: --max-model-len {context}"
                " fits"
            )
        return WantedLen(chosen, "chosen", True)
    if context > DEFAULT_MAX_MODEL_LEN_CAP:
        reason = f"the model's context is {context}; more than {DEFAULT_MAX_MODEL_LEN_CAP} must be asked for"
        return WantedLen(DEFAULT_MAX_MODEL_LEN_CAP, reason, False)
    return WantedLen(context, "the model's context", False)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: what each rank may use in all, of that for weights, a step and adapters, and what is left for KV.

    With `weights_on_disk`, `weights` are those that a token reads.

    The stages of a pipeline count as one rank: together they hold all weights and all layers' KV.
    """

    hardware: Hardware
    usable: int
    weights: int
    activations: int
    num_ranks: int = 1
    weights_on_disk: bool = False
    adapters: int = 0

    @property
    def left(self) -> int:
        """Bytes left for the KV cache."""
        return self.usable - self.weights - self.activations - self.adapters

    @property
    def adapters_text(self) -> str:
        """The part of an error's message about adapters; empty without them."""
        return f", adapters {format_bytes(self.adapters)} (--lora-bytes for less)" if self.adapters else ""

    @property
    def where(self) -> str:
        """The device, and which limit its memory has."""
        limit, device = self.hardware.memory_limit, self.hardware.device
        where = f"{device} ({limit})" if limit else device
        return where if self.num_ranks == 1 else f"{where} for each of {self.num_ranks} ranks"


def split_memory(
    options: EngineOptions, hardware: Hardware, model: ModelConfig, dtype: str, weights: int, num_tokens: int
) -> Memory:
    """Divide the device's memory. `num_tokens`: of the largest step; `weights`: bytes of those of all ranks."""
    usable, num_ranks = hardware.available_memory_bytes, options.tensor_parallel_size
    num_stages, num_engines = options.pipeline_parallel_size, num_sharing(options)
    if hardware.device == "cpu":
        usable = max(0, usable // num_engines - (options.num_ranks - 1) * RANK_RESERVE_BYTES) // num_ranks
    else:
        # Each rank has a GPU. Engines that have started already have taken their shares of what is available.
        usable = min(usable, int(options.gpu_memory_utilization * hardware.total_memory_bytes) // num_engines)
    beside = num_stages * bytes_beside(options, model, hardware.device, dtype, num_tokens)
    weights += _copied_bytes(options, model, weights)
    if model.draft is not None:
        weights += draft_weight_bytes(model.draft)
        beside += _cpu_step_bytes(options, model.draft.model, num_tokens)
    if options.distributed_executor_backend == "ray":
        usable *= num_stages  # each has a node like this one
    adapters = num_stages * options.lora_bytes if options.has_adapters else 0  # each rank may hold as much
    return Memory(hardware, usable, -(-weights // num_ranks), beside, num_ranks, adapters=adapters)


def all_cache_specs(model: ModelConfig) -> tuple[CacheSpec, ...]:
    """Kind of cache of each layer, with those of the draft model behind the others."""
    return model.cache_specs + (() if model.draft is None else model.draft.model.cache_specs)


def draft_weight_bytes(draft: DraftModel) -> int:
    """Size of a draft model's weights: as stored, else in bfloat16; of a part of the model at most, which has its
    type."""
    dtype = "bfloat16" if draft.kind == "draft" else "float32"
    return weight_bytes(draft.model, dtype, quantization=None, keeps_stored=True)


def wanted_kv_bytes(options: EngineOptions, shape: PoolShape, wanted: WantedLen) -> int:
    """Return the bytes of the KV cache that was chosen; else of one request of the wanted length."""
    if options.num_blocks_override is not None:
        return options.num_blocks_override * shape.block_bytes
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    return (shape.peak_blocks(wanted.value) + 1) * shape.block_bytes


def keep_experts_on_disk(
    options: EngineOptions, model: ModelConfig, memory: Memory, wanted: int, decisions: list[Decision]
) -> Memory:
    """Count only the weights that a token reads, if all of them leave less than `wanted` bytes for KV.

    The experts that tokens do not choose are then in the file of packed weights alone. The system keeps as many of
    them in memory as it has room for, and drops those that were read longest ago.
    Mutates: decisions, where that is possible.
    """
    smaller = replace(memory, weights=math.ceil(memory.weights * read_share(model)), weights_on_disk=True)
    can_map = options.weight_cache != "off" and options.load_format != "dummy" and memory.hardware.device == "cpu"
    # A limit on the address space counts the whole file.
    is_possible = can_map and "RLIMIT" not in memory.hardware.memory_limit and smaller.left > 0
    if memory.left >= wanted or smaller.weights == memory.weights or not is_possible:
        return memory
    reason = (
        f"{format_bytes(memory.weights)} do not fit in the {format_bytes(memory.usable)} available on {memory.where}: "
        f"those that every token reads stay in memory, experts are read when tokens choose them, and memory that is "
        "left keeps the last ones"
    )
    decisions.append(Decision("weights", "on disk", reason))
    return smaller


def num_sharing(options: EngineOptions) -> int:
    """Return the number of engines that share the device's memory: with `cuda:N` each has a GPU of its own."""
    return 1 if options.device.startswith("cuda:") else options.data_parallel_size


def _copied_bytes(options: EngineOptions, model: ModelConfig, weights: int) -> int:
    """Of all `weights` bytes those that several ranks hold: KV heads of which there are fewer than ranks, and a table
    of tokens that is the head of the last stage too."""
    num_copies = max(0, options.tensor_parallel_size - model.num_kv_heads)
    of_heads = 2 * model.num_layers * num_copies * model.head_size * model.hidden_size
    is_tied = options.pipeline_parallel_size > 1 and model.hf_config.get("tie_word_embeddings") is not False
    num_copied = of_heads + (model.vocab_size * model.hidden_size if is_tied else 0)
    return num_copied * weights // max(1, model.num_parameters)


def bytes_beside(options: EngineOptions, model: ModelConfig, device: str, dtype: str, num_tokens: int) -> int:
    """Reserve and activations of a step of `num_tokens` on this device."""
    if device == "cpu":
        return CPU_RESERVE_BYTES + _cpu_step_bytes(options, model, num_tokens)
    return GPU_RESERVE_BYTES + _gpu_step_bytes(options, model, dtype, num_tokens)


def _cpu_step_bytes(options: EngineOptions, model: ModelConfig, num_tokens: int) -> int:
    # All in fp32. The buffers of a plan share memory by lifetime and take about half of this estimate per token.
    per_token = 2 * model.hidden_size + max(_attention_width(model), _recurrent_width(model), 2 * _mlp_size(model))
    # Logits, and as much again in the sampler.
    per_row = 2 * model.vocab_size
    return 4 * (num_tokens * per_token + max(options.max_num_seqs, PROMPT_LOGPROB_ROWS) * per_row)


def _gpu_step_bytes(options: EngineOptions, model: ModelConfig, dtype: str, num_tokens: int) -> int:
    per_token = (
        4 * model.hidden_size + max(_attention_width(model), _recurrent_width(model)) + 3 * _mlp_size(model)
    ) * DTYPES[dtype]
    # Logits in the compute type and fp32, and as much again inside the sampler.
    per_row = model.vocab_size * (DTYPES[dtype] + 3 * 4)
    return num_tokens * per_token + options.max_num_seqs * per_row


def _attention_width(model: ModelConfig) -> int:
    return (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_size


def _recurrent_width(model: ModelConfig) -> int:
    """Projections, convolved values, gates and results of a layer with recurrent state; 0 without such layers."""
    fields = model.hf_config.get("text_config") or model.hf_config

    def size(*names: str) -> int:
        return math.prod(int(fields.get(name) or 0) for name in names)

    keys, values = (size(f"linear_num_{part}_heads", f"linear_{part}_head_dim") for part in ("key", "value"))
    inner = size("mamba_expand", "hidden_size") or size("expand", "hidden_size")
    state = size("mamba_n_groups", "mamba_d_state") or size("n_groups", "state_size")
    has_states = any(spec.is_state for spec in model.cache_specs)
    return max(4 * keys + 5 * values, 5 * inner + 4 * state) if has_states else 0


def _mlp_size(model: ModelConfig) -> int:
    fields = model.hf_config
    dense = int(fields.get("intermediate_size") or fields.get("ffn_dim") or 4 * model.hidden_size)
    # A token has a row for each of its experts.
    return max(dense, int(fields.get("num_experts_per_tok") or 1) * int(fields.get("moe_intermediate_size") or dense))


def kv_bytes(config: EngineConfig) -> int:
    """Bytes of the KV cache of each rank."""
    scheduler = config.scheduler
    shape = PoolShape(scheduler.kv_cache_groups, scheduler.block_size, scheduler.max_num_batched_tokens)
    return scheduler.num_blocks * shape.block_bytes


def engine_bytes(config: EngineConfig) -> int:
    """Bytes that an engine may use of a device: weights, KV cache, a step and what processes need.

    The CPU's memory holds all ranks and the host blocks; a GPU holds one rank.
    """
    options, scheduler = config.options, config.scheduler
    num_tokens, num_ranks = scheduler.max_num_batched_tokens, options.tensor_parallel_size
    beside = bytes_beside(options, config.model, config.device, config.dtype, num_tokens)
    weights = math.ceil(mapped_bytes(config) * config.resident_share)
    if config.model.draft is not None:
        weights += draft_weight_bytes(config.model.draft)
        beside += _cpu_step_bytes(options, config.model.draft.model, num_tokens)
    if config.device != "cpu":
        return -(-weights // num_ranks) + kv_bytes(config) + beside
    kv = kv_bytes(config) * (scheduler.num_blocks + scheduler.num_host_blocks) // scheduler.num_blocks
    if options.has_adapters:
        beside += options.lora_bytes
    of_stages = num_ranks * (kv + options.pipeline_parallel_size * beside)
    return weights + of_stages + (options.num_ranks - 1) * RANK_RESERVE_BYTES


def mapped_bytes(config: EngineConfig) -> int:
    """Return the bytes of the weights of all ranks, with those that several ranks hold."""
    return config.weight_bytes + _copied_bytes(config.options, config.model, config.weight_bytes)


def mapped_limit(config: EngineConfig) -> int:
    """Return the bytes of weights on disk that memory has room for, beside the KV cache and a step."""
    left = config.hardware.available_memory_bytes - engine_bytes(config)
    return max(0, left) + math.ceil(mapped_bytes(config) * config.resident_share)


def plan_blocks(
    options: EngineOptions, memory: Memory, shape: PoolShape, model_len: int, decisions: list[Decision]
) -> int:
    """Blocks of the pool, the null block included. Raises MemoryCapacityError when a chosen number does not fit."""
    if options.num_blocks_override is not None:
        num_blocks, reason = options.num_blocks_override, "chosen"
    elif options.kv_cache_memory_bytes is not None:
        num_blocks = options.kv_cache_memory_bytes // shape.block_bytes
        reason = f"kv_cache_memory_bytes is {format_bytes(options.kv_cache_memory_bytes)}"
    else:
        num_bytes, reason = _default_kv_bytes(options, memory, shape, model_len)
        num_blocks = num_bytes // shape.block_bytes
    if num_blocks * shape.block_bytes > memory.left:
        most = memory.left // shape.block_bytes
        fits = (
            f"--num-blocks-override {most} fits"
            if options.num_blocks_override is not None
            else f"--kv-cache-memory-bytes {memory.left} fits"
        )
        raise MemoryCapacityError(
            f"a KV cache of {num_blocks} blocks needs {format_bytes(num_blocks * shape.block_bytes)}, but"
            f" {format_bytes(memory.left)} are left on {memory.where} after weights and step"
            f"{memory.adapters_text}: {fits}"
        )
    size = format_bytes(num_blocks * shape.block_bytes)
    decisions.append(Decision("num_blocks", str(num_blocks), f"{size} of KV cache: {reason}"))
    return num_blocks


def _default_kv_bytes(options: EngineOptions, memory: Memory, shape: PoolShape, model_len: int) -> tuple[int, str]:
    """KV memory when none was chosen: bytes and the reason.

    Room for all sequences at full length if the user named their number and length. Else most of it would stay unused:
    room for sequences of usual length, and for a few of full length.
    """
    if memory.hardware.device != "cpu":
        share = f"gpu_memory_utilization={options.gpu_memory_utilization}"
        return memory.left, f"what {share} leaves after weights and activations"
    num_seqs, typical = options.max_num_seqs, min(model_len, DEFAULT_TOKENS_PER_SEQUENCE)
    choices = [
        (num_seqs * shape.peak_blocks(model_len), f"room for {num_seqs} sequences of {model_len} tokens"),
        (memory.left // 2 // shape.block_bytes - 1, "half of the memory left after the weights"),
        (
            MAX_DEFAULT_CPU_KV_BYTES // num_sharing(options) // shape.block_bytes - 1,
            "the most that is taken unasked" + _MORE,
        ),
    ]
    if options.max_model_len is None or num_seqs == DEFAULT_MAX_NUM_SEQS:
        usual = (
            (num_seqs * shape.peak_blocks(typical), f"room for {num_seqs} sequences of {typical} tokens{_MORE}"),
            (
                DEFAULT_NUM_CONTEXTS * shape.peak_blocks(model_len),
                f"room for {DEFAULT_NUM_CONTEXTS} sequences of {model_len} tokens{_MORE}",
            ),
        )
        choices.insert(1, max(usual, key=lambda choice: choice[0]))
    num_blocks, reason = min(choices, key=lambda choice: choice[0])
    return (num_blocks + 1) * shape.block_bytes, reason


def plan_swap(
    options: EngineOptions, memory: Memory, shape: PoolShape, num_blocks: int, decisions: list[Decision]
) -> int:
    """Return the blocks of host memory that preempted requests get. Raises: ConfigError, MemoryCapacityError."""
    mode, chosen, pool_bytes = options.preemption_mode, options.swap_space, num_blocks * shape.block_bytes
    if mode == "recompute":
        if chosen:
            raise ConfigError(
                f"swap_space={chosen} contradicts preemption_mode='recompute': --preemption-mode swap fits"
            )
        decisions.append(Decision("preemption_mode", "recompute", "chosen"))
        return 0
    if not options.enable_prefix_caching:
        hindrance = "finds blocks by their prefix: leave enable_prefix_caching on"
        if mode == "swap":
            raise ConfigError(f"preemption_mode='swap' {hindrance}")
        decisions.append(Decision("preemption_mode", "recompute", f"swapping {hindrance}"))
        return 0
    is_cpu = memory.hardware.device == "cpu"
    left = max(0, memory.left - pool_bytes) if is_cpu else DEFAULT_SWAP_BYTES
    if chosen is None:
        num_bytes = min(pool_bytes, DEFAULT_SWAP_BYTES, left // 2 if is_cpu else left)
        reason = "as much as the KV cache, at most 4 GiB" + (" and half of the memory left" if is_cpu else "")
    else:
        num_bytes, reason = int(chosen * 2**30), "chosen"
        if is_cpu and num_bytes > left:
            raise MemoryCapacityError(
                f"swap_space={chosen} GiB does not fit: {format_bytes(left)} are left on {memory.where} beside the KV"
                f" cache; --swap-space {int(left / 2**30 * 100) / 100} fits"
            )
    num_swap_blocks = num_bytes // shape.block_bytes
    decisions.append(Decision("preemption_mode", mode, f"{num_swap_blocks} blocks of host memory: {reason}"))
    return num_swap_blocks


def plan_disk(options: EngineOptions, shape: PoolShape, decisions: list[Decision]) -> int:
    """Return the limit of the directory of evicted blocks in bytes, 0 without one. Raises: ConfigError."""
    if options.kv_disk is None:
        if options.kv_disk_bytes is not None:
            raise ConfigError(f"kv_disk_bytes={options.kv_disk_bytes} has no directory: add --kv-disk DIR")
        return 0
    contradictions = {
        "needs the prefix cache: leave enable_prefix_caching on": not options.enable_prefix_caching,
        "is of one machine: --distributed-executor-backend mp fits": options.distributed_executor_backend == "ray",
        "needs weights from files: --load-format auto fits": options.load_format == "dummy",
    }
    for problem, holds in contradictions.items():
        if holds:
            raise ConfigError(f"kv_disk={options.kv_disk!r} {problem}")
    limit = DEFAULT_DISK_BYTES if options.kv_disk_bytes is None else options.kv_disk_bytes
    block_bytes = options.tensor_parallel_size * shape.block_bytes
    fewest = MIN_DISK_BLOCKS * block_bytes
    if limit < fewest:
        raise ConfigError(
            f"kv_disk_bytes={limit} holds fewer than {MIN_DISK_BLOCKS} KV blocks of {format_bytes(block_bytes)}:"
            f" --kv-disk-bytes {fewest} fits"
        )
    reason = "the default" if options.kv_disk_bytes is None else "chosen"
    decisions.append(
        Decision("kv_disk_bytes", str(limit), f"at most {format_bytes(limit)} in {options.kv_disk}: {reason}")
    )
    return limit


def fit_model_len(
    options: EngineOptions,
    memory: Memory,
    shape: PoolShape,
    wanted: WantedLen,
    num_blocks: int,
    decisions: list[Decision],
) -> int:
    """Return the context that one request can really have in this pool.

    Raises: MemoryCapacityError when a chosen context, or not even one block per group, fits.
    """
    needed = shape.peak_blocks(wanted.value)
    if needed <= num_blocks - 1:
        decisions.append(Decision("max_model_len", str(wanted.value), wanted.reason))
        return wanted.value
    longest = shape.longest_sequence(num_blocks - 1, wanted.value)
    if wanted.chosen_by_user or longest < 1:
        blocks = needed if wanted.chosen_by_user else len(shape.groups)
        length = wanted.value if wanted.chosen_by_user else 1
        raise MemoryCapacityError(
            f"one request of {length} tokens needs {blocks} KV blocks and the null block"
            f" ({format_bytes((blocks + 1) * shape.block_bytes)}), but the KV cache has {num_blocks} blocks"
            f" ({format_bytes(num_blocks * shape.block_bytes)}):"
            f" {_fixes(options, memory, shape, longest, blocks + 1)}"
        )
    reason = f"what {num_blocks} KV blocks of {shape.block_size} tokens hold ({wanted.value} was wanted)"
    decisions.append(Decision("max_model_len", str(longest), reason))
    return longest


def _fixes(options: EngineOptions, memory: Memory, shape: PoolShape, longest: int, num_blocks: int) -> str:
    fixes = []
    if longest >= 1:
        fixes.append(f"--max-model-len {longest} fits")
    if num_blocks * shape.block_bytes <= memory.left:
        if options.num_blocks_override is not None:
            fixes.append(f"--num-blocks-override {num_blocks} fits")
        else:
            fixes.append(f"--kv-cache-memory-bytes {num_blocks * shape.block_bytes} fits")
    if not fixes:
        missing = num_blocks * shape.block_bytes - memory.left
        fixes.append(f"{format_bytes(missing)} of memory are missing; a smaller model, dtype or block_size may fit")
    return ", ".join(fixes)
