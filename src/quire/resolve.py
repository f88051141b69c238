"""`resolve`: makes the engine's configuration from the user's options, the machine and the model, with reasons.

Pure: it reads no file, no environment and no clock, so every rule here is a row of a table in its test. It must not
know tensors or torch. An error names the numbers and a setting that fits, and that setting does resolve.
Next to read: `config.py` for the fields, `memory_plan.py` for the KV cache; `runtime/hardware.py` finds `Hardware`.
"""

from dataclasses import replace

from quire.byte_sizes import format_bytes
from quire.cache_spec import PoolShape, fit_block_size, make_groups
from quire.config import (
    DTYPES,
    KV_DTYPES,
    KV_SCALE_BYTES,
    NARROW_KV_DTYPES,
    QUANTIZED_BITS,
    Decision,
    EngineConfig,
    EngineOptions,
    Hardware,
    ModelConfig,
    SchedulerConfig,
    canonical_dtype,
    canonical_kv_dtype,
    weight_bytes,
)
from quire.errors import ConfigError, MemoryCapacityError
from quire.memory_plan import (
    Memory,
    all_cache_specs,
    fit_model_len,
    keep_experts_on_disk,
    plan_blocks,
    plan_disk,
    plan_swap,
    split_memory,
    wanted_kv_bytes,
    wanted_model_len,
)
from quire.rank_plan import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    check_sizes,
    decode_iterations,
    draft_source,
    explain_ranks,
    step_tokens,
)

PLAN_BLOCK_MULTIPLE = 16
"""Native attention reads the keys of this many tokens at once."""
DEFAULT_BLOCK_SIZE = 32


def resolve(options: EngineOptions, hardware: Hardware, model: ModelConfig) -> EngineConfig:
    """Decide every option that the user left open.

    Raises: ConfigError for options that contradict each other or the model; MemoryCapacityError for what does not fit.
    """
    _check_options(options)
    check_sizes(options, model, hardware)
    decisions: list[Decision] = []
    device = _resolve_device(options, hardware, decisions)
    if hardware.tuned:
        decisions.append(Decision("num_threads", str(hardware.num_threads), f"quire tune: {hardware.tuned}"))
    block_size = _resolve_block_size(options, model, decisions)
    gpu_kernels = _resolve_gpu_kernels(options, hardware, model)
    uses_plan = _resolve_execution(options, device, model, block_size, gpu_kernels, decisions)
    dtype = _resolve_dtype(options, hardware, uses_plan, decisions)
    keeps_stored = uses_plan and canonical_dtype(options.dtype) != "float32"
    batch_invariant = _resolve_batch_invariance(options, hardware, dtype, uses_plan, decisions)
    if options.quantization is not None:
        reason = "chosen; weights that are stored in 8 bit or less stay as they are"
        decisions.append(Decision("quantization", options.quantization, reason))
    kv_dtype = _resolve_kv_dtype(options, dtype, decisions)
    wanted_len = wanted_model_len(options, model)
    stored = KV_DTYPES[kv_dtype], KV_SCALE_BYTES[kv_dtype]
    num_ranks = options.tensor_parallel_size
    groups = make_groups([spec.stored_as(*stored).on_rank(num_ranks) for spec in all_cache_specs(model)], block_size)
    shape = PoolShape(groups, block_size, _resolve_batched_tokens(options, wanted_len.value, decisions))
    weights = weight_bytes(model, dtype, quantization=options.quantization, keeps_stored=keeps_stored)
    memory = split_memory(options, hardware, model, dtype, weights, shape.max_num_batched_tokens)
    memory = keep_experts_on_disk(options, model, memory, wanted_kv_bytes(options, shape, wanted_len), decisions)
    explain_ranks(options, hardware, decisions)
    _check_weights_fit(options, model, memory, dtype, uses_plan=uses_plan)
    num_blocks = plan_blocks(options, memory, shape, wanted_len.value, decisions)
    max_model_len = fit_model_len(options, memory, shape, wanted_len, num_blocks, decisions)
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
        pipeline_stages=options.pipeline_parallel_size,
        multi_step_decode=decode_iterations(options, decisions, has_device_plan=gpu_kernels != "off"),
        policy=options.scheduling_policy,
        sjf_ageing_tokens_per_s=options.sjf_ageing_tokens_per_s,
        max_num_waiting=options.max_num_waiting,
        num_host_blocks=plan_swap(options, memory, shape, num_blocks, decisions),
        compares_swap=options.preemption_mode == "auto",
        max_disk_bytes=plan_disk(options, shape, decisions),
    )
    drafts = draft_source(options, decisions, model, uses_plan=uses_plan)
    return EngineConfig(
        options,
        model,
        hardware,
        device,
        dtype,
        kv_dtype,
        scheduler,
        tuple(decisions),
        uses_plan,
        keeps_stored,
        memory.weights_on_disk,
        drafts,
        batch_invariant,
        gpu_kernels,
    )


def _check_options(options: EngineOptions) -> None:
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
    for name, off in (("max_num_partial_prefills", 1), ("long_prefill_token_threshold", 0)):
        if getattr(options, name) > off and not options.enable_chunked_prefill:
            raise ConfigError(
                f"{name}={getattr(options, name)} needs chunked prefill:"
                f" set enable_chunked_prefill, or --{name.replace('_', '-')} {off}"
            )


def _resolve_device(options: EngineOptions, hardware: Hardware, decisions: list[Decision]) -> str:
    asked = options.device
    if asked != "auto" and asked.split(":")[0] != hardware.device.split(":")[0]:
        raise ConfigError(f"device={asked!r} was asked for, but the machine offers {hardware.device!r}; --device auto")
    found = "no CUDA device was found" if hardware.device == "cpu" else "a CUDA device was found"
    decisions.append(Decision("device", hardware.device, "chosen" if asked != "auto" else found))
    return hardware.device


def _resolve_gpu_kernels(options: EngineOptions, hardware: Hardware, model: ModelConfig) -> str:
    """Return what computes a device plan; "off" without a GPU, and for what runs op by op there."""
    if options.enforce_eager or model.implementation == "transformers" or options.num_ranks > 1:
        return "off"
    if options.gpu_kernels != "auto":
        return options.gpu_kernels
    # Below compute capability 8.0 Triton multiplies without tensor cores: op by op is as fast there.
    is_able = hardware.device != "cpu" and hardware.has_fast_bfloat16 and hardware.has_triton
    return "triton" if is_able else "off"


def _resolve_execution(
    options: EngineOptions,
    device: str,
    model: ModelConfig,
    block_size: int,
    gpu_kernels: str,
    decisions: list[Decision],
) -> bool:
    """Return True if the model runs as a native plan."""
    reasons = {
        "Transformers' own module computes the model": model.implementation == "transformers",
        f"{gpu_kernels} kernels were chosen, which compute a device plan": device == "cpu" and gpu_kernels != "off",
        "a GPU computes the model": device != "cpu",
        "enforce_eager was chosen": options.enforce_eager,
        f"a plan needs blocks of a multiple of {PLAN_BLOCK_MULTIPLE} tokens": block_size % PLAN_BLOCK_MULTIPLE != 0,
    }
    against = next((reason for reason, holds in reasons.items() if holds), None)
    needs_plan = {
        "quantization": options.quantization is not None,
        "kv_cache_dtype": canonical_kv_dtype(options) in NARROW_KV_DTYPES,
        "tensor_parallel_size": options.tensor_parallel_size > 1 and model.implementation == "transformers",
        "pipeline_parallel_size": options.pipeline_parallel_size > 1,
    }
    option = next((name for name, is_chosen in needs_plan.items() if is_chosen), None)
    if against is not None and option is not None:
        fitting = f"--{option.replace('_', '-')} 1 fits" if option.endswith("_size") else f"leave {option} unset"
        raise ConfigError(
            f"{option}={getattr(options, option)!r} needs a native plan, which cannot be used: {against}; {fitting}"
        )
    as_plan = Decision("execution", "plan", "the model's forward runs as one native call per step")
    if gpu_kernels != "off":
        kernels = "Triton kernels" if gpu_kernels == "triton" else "PyTorch"
        as_plan = Decision("execution", "device plan", f"{kernels} on static memory, captured as graphs on a GPU")
    decisions.append(Decision("execution", "eager", against) if against and gpu_kernels == "off" else as_plan)
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


def _resolve_batch_invariance(
    options: EngineOptions, hardware: Hardware, dtype: str, uses_plan: bool, decisions: list[Decision]
) -> bool:
    """Return True if all numbers of rows are computed alike."""
    if hardware.device != "cpu":
        if options.batch_invariant:
            raise ConfigError(
                "batch_invariant is for CPUs: a GPU's products depend on the number of rows; leave it out"
            )
        decisions.append(Decision("batch_invariant", "off", "a GPU's products depend on the number of rows"))
        return False
    varies = hardware.has_tiles and uses_plan and dtype != "float32" and not options.batch_invariant
    reason = "chosen" if options.batch_invariant else "one arithmetic is the fastest for any number of rows"
    if varies:
        rows = hardware.tile_rows
        reason = f"prompts and steps of {rows} tokens or more use AMX's bf16 tiles; --batch-invariant prevents it"
    decisions.append(Decision("batch_invariant", "off" if varies else "on", reason))
    return not varies


def _resolve_kv_dtype(options: EngineOptions, dtype: str, decisions: list[Decision]) -> str:
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else canonical_kv_dtype(options)
    reason = "same as dtype" if options.kv_cache_dtype == "auto" else "chosen"
    decisions.append(Decision("kv_cache_dtype", kv_dtype, reason))
    return kv_dtype


def _resolve_block_size(options: EngineOptions, model: ModelConfig, decisions: list[Decision]) -> int:
    # The KV type is not decided yet, since plans and thus types depend on the block size: 16 bit unless chosen.
    dtype = canonical_dtype(options.dtype) if options.kv_cache_dtype == "auto" else canonical_kv_dtype(options)
    specs = [spec.stored_as(KV_DTYPES[dtype or "bfloat16"], 0) for spec in all_cache_specs(model)]
    block_size, reason = fit_block_size(specs, DEFAULT_BLOCK_SIZE), "default"
    if options.block_size is not None:
        block_size, reason = options.block_size, "chosen"
    elif block_size != DEFAULT_BLOCK_SIZE:
        reason = f"blocks of {DEFAULT_BLOCK_SIZE} tokens would leave most of a page that holds recurrent state empty"
    decisions.append(Decision("block_size", str(block_size), reason))
    return block_size


def _resolve_batched_tokens(options: EngineOptions, model_len: int, decisions: list[Decision]) -> int:
    budget = step_tokens(options, decisions)
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


def _check_weights_fit(
    options: EngineOptions, model: ModelConfig, memory: Memory, dtype: str, *, uses_plan: bool
) -> None:
    """Raises: MemoryCapacityError when weights and step leave no memory for KV."""
    if memory.left > 0:
        return
    needed = memory.weights + memory.activations + memory.adapters
    is_plain = memory.weights == -(-model.num_parameters * DTYPES[dtype] // memory.num_ranks)
    raise MemoryCapacityError(
        f"the weights need {format_bytes(memory.weights)} in {dtype if is_plain else options.quantization or 'all'}"
        f" and a step {format_bytes(memory.activations)}{memory.adapters_text}, {format_bytes(needed)} together;"
        f" that is {format_bytes(needed - memory.usable)} more than the {format_bytes(memory.usable)} available on"
        f" {memory.where}: {_what_fits(options, model, memory, uses_plan=uses_plan)}"
    )


def _what_fits(options: EngineOptions, model: ModelConfig, memory: Memory, *, uses_plan: bool) -> str:
    """Advice: the dtype or quantisation that would fit, else how large a model may be."""
    dtype, hardware = canonical_dtype(options.dtype), memory.hardware
    changes: list[dict[str, str]] = [{"weight_cache": "auto"}] if options.weight_cache == "off" else []
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
        return f"--{name.replace('_', '-')} {value} fits ({format_bytes(config.weight_bytes)})"
    smallest = min(QUANTIZED_BITS, key=QUANTIZED_BITS.__getitem__) if uses_plan else "16 bit"
    most = memory.num_ranks * max(0, memory.left + memory.weights) * 8 / QUANTIZED_BITS.get(smallest, 16)
    return (
        f"a model of at most {most / 1e9:.2f} billion parameters fits in {smallest}, this one has"
        f" {model.num_parameters / 1e9:.2f}"
    )
