"""`resolve`: from what the user chose, the machine and the model to what will run, each decision with its reason.

Pure: it reads no file, no environment and no clock, so every rule here is a row of a table in its test. It must not
know tensors or torch. An error names the numbers and a setting that fits, and that setting does resolve.
Next to read: `config.py` for the fields, `cache_spec.py`, `step_memory.py`; `runtime/hardware.py`, whence `Hardware`.
"""

from dataclasses import dataclass, replace

from quire.byte_sizes import format_bytes
from quire.cache_spec import PoolShape
from quire.config import (
    DEFAULT_MAX_MODEL_LEN_CAP,
    DTYPES,
    KV_DTYPES,
    KV_SCALE_BYTES,
    QUANTIZED_BITS,
    Decision,
    EngineConfig,
    EngineOptions,
    Hardware,
    ModelConfig,
    SchedulerConfig,
    canonical_dtype,
    weight_bytes,
)
from quire.errors import ConfigError, MemoryCapacityError
from quire.step_memory import bytes_beside

PLAN_BLOCK_MULTIPLE = 16
"""Native attention reads keys of so many tokens at once."""
CPU_BLOCK_SIZE = 32
GPU_BLOCK_SIZE = 16
MAX_DEFAULT_CPU_KV_BYTES = 4 * 2**30
"""A machine that is also used for other things should not lose more than this unasked."""
DEFAULT_MAX_NUM_BATCHED_TOKENS = EngineOptions.__dataclass_fields__["max_num_batched_tokens"].default


def resolve(options: EngineOptions, hardware: Hardware, model: ModelConfig) -> EngineConfig:
    """Decide everything that was left open.

    Raises: ConfigError for options that contradict each other or the model; MemoryCapacityError for what does not fit.
    """
    _check_options(options)
    decisions: list[Decision] = []
    device = _resolve_device(options, hardware, decisions)
    block_size = _resolve_block_size(options, device, decisions)
    uses_plan = _resolve_execution(options, device, block_size, decisions)
    dtype = _resolve_dtype(options, hardware, uses_plan, decisions)
    keeps_stored = uses_plan and canonical_dtype(options.dtype) != "float32"
    if options.quantization is not None:
        reason = "chosen; weights that are stored in 8 bit or less stay as they are"
        decisions.append(Decision("quantization", options.quantization, reason))
    kv_dtype = _resolve_kv_dtype(options, dtype, decisions)
    wanted_len = _wanted_model_len(options, model)
    groups = tuple(
        replace(group, spec=replace(group.spec, dtype_bytes=KV_DTYPES[kv_dtype], scale_bytes=KV_SCALE_BYTES[kv_dtype]))
        for group in model.kv_cache_groups
    )
    shape = PoolShape(groups, block_size, _resolve_batched_tokens(options, wanted_len.value, decisions))
    weights = weight_bytes(model, dtype, quantization=options.quantization, keeps_stored=keeps_stored)
    memory = _memory_for_kv(options, hardware, model, dtype, weights, shape.max_num_batched_tokens, uses_plan=uses_plan)
    num_blocks = _resolve_num_blocks(options, hardware, memory, shape, wanted_len.value, decisions)
    max_model_len = _fit_model_len(options, memory, shape, wanted_len, num_blocks, decisions)
    scheduler = SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_groups=groups,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
        max_num_partial_prefills=options.max_num_partial_prefills,
        max_long_partial_prefills=options.max_long_partial_prefills,
        long_prefill_token_threshold=_resolve_long_threshold(options, shape.max_num_batched_tokens, decisions),
        prefill_tokens_per_decode=_resolve_prefill_share(options, device, decisions),
        max_decode_rounds=options.max_decode_rounds,
        policy=options.scheduling_policy,
        sjf_ageing_tokens_per_s=options.sjf_ageing_tokens_per_s,
        max_num_waiting=options.max_num_waiting,
    )
    return EngineConfig(
        options, model, hardware, device, dtype, kv_dtype, scheduler, tuple(decisions), uses_plan, keeps_stored
    )


@dataclass(frozen=True, slots=True)
class _WantedLen:
    value: int
    reason: str
    chosen_by_user: bool


@dataclass(frozen=True, slots=True)
class _Memory:
    """Bytes: what Quire may use in all, of that for weights, for activations, and what is left for KV."""

    usable: int
    weights: int
    activations: int

    @property
    def left(self) -> int:
        return self.usable - self.weights - self.activations


def _check_options(options: EngineOptions) -> None:
    if options.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={options.tensor_parallel_size} is not available yet: --tensor-parallel-size 1 works"
        )
    if options.quantization is not None and canonical_dtype(options.dtype) == "float32":
        raise ConfigError(
            f"quantization={options.quantization!r} contradicts dtype='float32', which computes with the stored values:"
            " --dtype bfloat16 fits"
        )
    if options.max_num_seqs > options.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_seqs={options.max_num_seqs} is above max_num_batched_tokens={options.max_num_batched_tokens}: a"
            f" step could not give every sequence a token; --max-num-seqs {options.max_num_batched_tokens} fits"
        )
    if options.max_long_partial_prefills > options.max_num_partial_prefills:
        raise ConfigError(
            f"max_long_partial_prefills={options.max_long_partial_prefills} is above max_num_partial_prefills="
            f"{options.max_num_partial_prefills}; --max-long-partial-prefills {options.max_num_partial_prefills} fits"
        )
    if options.max_num_partial_prefills > 1 and not options.enable_chunked_prefill:
        raise ConfigError(
            f"max_num_partial_prefills={options.max_num_partial_prefills} needs chunked prefill:"
            " set enable_chunked_prefill, or --max-num-partial-prefills 1"
        )


def _resolve_device(options: EngineOptions, hardware: Hardware, decisions: list[Decision]) -> str:
    asked = options.device
    if asked != "auto" and asked.split(":")[0] != hardware.device.split(":")[0]:
        raise ConfigError(f"device={asked!r} was asked for, but the machine offers {hardware.device!r}; --device auto")
    if asked != "auto":
        reason = "chosen"
    else:
        reason = "no CUDA device was found" if hardware.device == "cpu" else "a CUDA device was found"
    decisions.append(Decision("device", hardware.device, reason))
    return hardware.device


def _resolve_execution(options: EngineOptions, device: str, block_size: int, decisions: list[Decision]) -> bool:
    """Whether the model runs as a native plan."""
    reasons = {
        "on a GPU kernels are launched one by one": device != "cpu",
        "enforce_eager was chosen": options.enforce_eager,
        f"a plan needs blocks of a multiple of {PLAN_BLOCK_MULTIPLE} tokens": block_size % PLAN_BLOCK_MULTIPLE != 0,
    }
    against = next((reason for reason, holds in reasons.items() if holds), None)
    if against is not None and (options.quantization is not None or options.kv_cache_dtype == "int8"):
        option = "quantization" if options.quantization is not None else "kv_cache_dtype"
        raise ConfigError(
            f"{option}={getattr(options, option)!r} needs a native plan, which cannot be used: {against}; "
            f"leave {option} unset"
        )
    reason = against or "the model's forward runs as one native call per step"
    decisions.append(Decision("execution", "eager" if against else "plan", reason))
    return against is None


def _resolve_dtype(options: EngineOptions, hardware: Hardware, uses_plan: bool, decisions: list[Decision]) -> str:
    chosen = canonical_dtype(options.dtype)
    if chosen is not None:
        reason = "chosen: reference numerics" if chosen == "float32" else "chosen"
    elif uses_plan:
        chosen, reason = "bfloat16", "half the bytes of float32; quantised weights stay as they are stored"
    elif hardware.has_fast_bfloat16:
        chosen, reason = "bfloat16", f"{hardware.name or hardware.device} multiplies bfloat16 fast"
    elif hardware.device == "cpu":
        chosen, reason = "float32", "this CPU has no bfloat16 instructions"
    else:
        chosen, reason = "float16", "this GPU has no bfloat16 instructions (compute capability below 8.0)"
    decisions.append(Decision("dtype", chosen, reason))
    return chosen


def _resolve_kv_dtype(options: EngineOptions, dtype: str, decisions: list[Decision]) -> str:
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    reason = "same as dtype" if options.kv_cache_dtype == "auto" else "chosen"
    decisions.append(Decision("kv_cache_dtype", kv_dtype, reason))
    return kv_dtype


def _resolve_block_size(options: EngineOptions, device: str, decisions: list[Decision]) -> int:
    if options.block_size is not None:
        block_size, reason = options.block_size, "chosen"
    else:
        block_size = CPU_BLOCK_SIZE if device == "cpu" else GPU_BLOCK_SIZE
        reason = f"default on {device.split(':')[0]}"
    decisions.append(Decision("block_size", str(block_size), reason))
    return block_size


def _wanted_model_len(options: EngineOptions, model: ModelConfig) -> _WantedLen:
    context, chosen = model.context_len, options.max_model_len
    if chosen is not None:
        if chosen > context:
            raise ConfigError(
                f"max_model_len={chosen} is above the model's context of {context} tokens: --max-model-len {context}"
                " fits"
            )
        return _WantedLen(chosen, "chosen", True)
    if context > DEFAULT_MAX_MODEL_LEN_CAP:
        reason = f"the model's context is {context}; more than {DEFAULT_MAX_MODEL_LEN_CAP} must be asked for"
        return _WantedLen(DEFAULT_MAX_MODEL_LEN_CAP, reason, False)
    return _WantedLen(context, "the model's context", False)


def _resolve_batched_tokens(options: EngineOptions, model_len: int, decisions: list[Decision]) -> int:
    budget = options.max_num_batched_tokens
    if options.enable_chunked_prefill or budget >= model_len:
        return budget
    if budget != DEFAULT_MAX_NUM_BATCHED_TOKENS:
        raise ConfigError(
            f"max_num_batched_tokens={budget} is below max_model_len={model_len}, and without chunked prefill a prompt"
            f" must fit one step: --max-num-batched-tokens {model_len} or --max-model-len {budget} fits,"
            " or enable chunked prefill"
        )
    reason = "without chunked prefill a prompt of max_model_len must fit one step"
    decisions.append(Decision("max_num_batched_tokens", str(model_len), reason))
    return model_len


def _resolve_prefill_share(options: EngineOptions, device: str, decisions: list[Decision]) -> int | None:
    if options.performance_mode == "throughput" or device != "cpu" or not options.enable_chunked_prefill:
        return None
    reason = "performance_mode=interactivity: at least so many, and what the machine is measured to compute in time"
    decisions.append(Decision("prefill_tokens_per_decode", "2", reason))
    return 2


def _resolve_long_threshold(options: EngineOptions, budget: int, decisions: list[Decision]) -> int:
    threshold, num_partial = options.long_prefill_token_threshold, options.max_num_partial_prefills
    if threshold or num_partial == 1:
        return threshold
    share = max(1, budget // num_partial)
    reason = f"one of {num_partial} partial prompts must not take the whole budget of {budget} tokens"
    decisions.append(Decision("long_prefill_token_threshold", str(share), reason))
    return share


def _memory_for_kv(
    options: EngineOptions, hardware: Hardware, model: ModelConfig, dtype: str, weights: int, num_tokens: int,
    *, uses_plan: bool,
) -> _Memory:  # fmt: skip
    """How much memory is left for KV. Raises MemoryCapacityError when the weights alone do not fit."""
    if hardware.device == "cpu":
        usable = hardware.available_memory_bytes
    else:
        share = int(options.gpu_memory_utilization * hardware.total_memory_bytes)
        usable = min(share, hardware.available_memory_bytes)
    activations = bytes_beside(options, model, hardware.device, dtype, num_tokens)
    memory = _Memory(usable, weights, activations)
    if memory.left <= 0:
        needed = memory.weights + memory.activations
        is_plain = weights == model.num_parameters * DTYPES[dtype]
        raise MemoryCapacityError(
            f"the weights need {format_bytes(memory.weights)} in {dtype if is_plain else options.quantization or 'all'}"
            f" and a step {format_bytes(activations)}, {format_bytes(needed)} together; that is"
            f" {format_bytes(needed - usable)} more than the {format_bytes(usable)} available on"
            f" {_where(hardware)}: {_what_fits(options, hardware, model, memory, uses_plan=uses_plan)}"
        )
    return memory


def _what_fits(
    options: EngineOptions, hardware: Hardware, model: ModelConfig, memory: _Memory, *, uses_plan: bool
) -> str:
    """The dtype or quantisation that would fit, else how large a model may be."""
    dtype = canonical_dtype(options.dtype)
    changes: list[dict[str, str]] = []
    if dtype in (None, "float32"):
        fast = hardware.device == "cpu" or hardware.has_fast_bfloat16
        changes.append({"dtype": "bfloat16" if fast else "float16"})
    if uses_plan and dtype != "float32" and options.quantization is None:
        changes += [{"quantization": name} for name in QUANTIZED_BITS]
    for change in changes:
        try:
            # The whole resolution, so that the advice holds for the KV cache too.
            config = resolve(replace(options, **change), hardware, model)  # type: ignore[arg-type]
        except (ConfigError, MemoryCapacityError):
            continue
        ((name, value),) = change.items()
        return f"--{name} {value} fits ({format_bytes(config.weight_bytes)})"
    smallest = min(QUANTIZED_BITS, key=QUANTIZED_BITS.__getitem__) if uses_plan else "16 bit"
    most = max(0, memory.usable - memory.activations) * 8 / QUANTIZED_BITS.get(smallest, 16)
    return (
        f"a model of at most {most / 1e9:.2f} billion parameters fits in {smallest}, this one has"
        f" {model.num_parameters / 1e9:.2f}"
    )


def _where(hardware: Hardware) -> str:
    """The device, and which limit its memory has."""
    return f"{hardware.device} ({hardware.memory_limit})" if hardware.memory_limit else hardware.device


def _resolve_num_blocks(
    options: EngineOptions,
    hardware: Hardware,
    memory: _Memory,
    shape: PoolShape,
    model_len: int,
    decisions: list[Decision],
) -> int:
    """Blocks of the pool, the null block included. Raises MemoryCapacityError when a chosen number does not fit."""
    if options.num_blocks_override is not None:
        num_blocks, reason = options.num_blocks_override, "chosen"
    elif options.kv_cache_memory_bytes is not None:
        num_blocks = options.kv_cache_memory_bytes // shape.block_bytes
        reason = f"kv_cache_memory_bytes is {format_bytes(options.kv_cache_memory_bytes)}"
    else:
        num_bytes, reason = _default_kv_bytes(options, hardware, memory, shape, model_len)
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
            f" {format_bytes(memory.left)} are left on {_where(hardware)} after weights and step: {fits}"
        )
    size = format_bytes(num_blocks * shape.block_bytes)
    decisions.append(Decision("num_blocks", str(num_blocks), f"{size} of KV cache: {reason}"))
    return num_blocks


def _default_kv_bytes(
    options: EngineOptions, hardware: Hardware, memory: _Memory, shape: PoolShape, model_len: int
) -> tuple[int, str]:
    """KV memory when none was chosen: bytes and the reason."""
    if hardware.device != "cpu":
        share = f"gpu_memory_utilization={options.gpu_memory_utilization}"
        return memory.left, f"what {share} leaves after weights and activations"
    all_sequences = (options.max_num_seqs * shape.peak_blocks(model_len) + 1) * shape.block_bytes
    choices = (
        (all_sequences, f"room for {options.max_num_seqs} sequences of {model_len} tokens"),
        (memory.left // 2, "half of the memory left after the weights"),
        (MAX_DEFAULT_CPU_KV_BYTES, "the most that is taken unasked; --kv-cache-memory-bytes for more"),
    )
    return min(choices, key=lambda choice: choice[0])


def _fit_model_len(
    options: EngineOptions,
    memory: _Memory,
    shape: PoolShape,
    wanted: _WantedLen,
    num_blocks: int,
    decisions: list[Decision],
) -> int:
    """The context that one request can really have in this pool.

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


def _fixes(options: EngineOptions, memory: _Memory, shape: PoolShape, longest: int, num_blocks: int) -> str:
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
