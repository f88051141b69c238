"""Memory of a rank: the KV cache, the memory plan, what other settings change in it, and activations by chunk length.

`plan_memory` asks `resolve` and `memory_plan.py`, as the engine does. Next to read: `explanation.py`, the caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from quire.byte_sizes import format_bytes
from quire.cache_spec import CacheSpec, LatentKV, PagedKV, PoolShape, make_groups
from quire.config import (
    DTYPES,
    KV_DTYPES,
    KV_SCALE_BYTES,
    NARROW_KV_DTYPES,
    EngineConfig,
    EngineOptions,
    Hardware,
    ModelConfig,
    canonical_kv_dtype,
)
from quire.errors import CapacityError
from quire.insight.explain.device import Device
from quire.insight.explain.phases import Phase
from quire.insight.explain.report import Quantity, Section
from quire.insight.explain.subject import DEFAULT_UTILIZATION, RankModel, Settings, Variant, price, remedies
from quire.kernels.instruction import StepShape
from quire.memory_plan import (
    Memory,
    keep_experts_on_disk,
    mapped_bytes,
    mapped_limit,
    split_memory,
    wanted_kv_bytes,
    wanted_model_len,
)
from quire.resolve import resolve
from quire.runtime.worker import KV_FORMATS

UNLIMITED_BYTES = 1 << 60
STEP_LENGTHS = (256, 1024, 4096)
"""Tokens of a step whose activations are shown, beside the budget and the lengths that were asked for."""


def is_foreign(options: EngineOptions, hardware: Hardware) -> bool:
    """Return True for a KV type that this engine has on CPUs only, on a GPU."""
    return hardware.device != "cpu" and canonical_kv_dtype(options) in NARROW_KV_DTYPES


def resolve_unlimited(options: EngineOptions, hardware: Hardware, model: ModelConfig) -> EngineConfig:
    """Resolve options with memory for everything, and with any KV type on any device. Raises: ConfigError."""
    unlimited = replace(hardware, total_memory_bytes=UNLIMITED_BYTES, available_memory_bytes=UNLIMITED_BYTES)
    is_known = not is_foreign(options, hardware)
    # The engine's own default on a CPU is a few GiB, and would refuse long contexts.
    kv_bytes = UNLIMITED_BYTES // 2 if hardware.device == "cpu" else None
    roomy = replace(
        options, kv_cache_memory_bytes=kv_bytes, kv_cache_dtype=options.kv_cache_dtype if is_known else "auto"
    )
    config = replace(resolve(roomy, unlimited, model), options=options)
    if is_known:
        return config
    kv_dtype = canonical_kv_dtype(options)
    specs = [spec.stored_as(KV_DTYPES[kv_dtype], KV_SCALE_BYTES[kv_dtype]) for spec in model.cache_specs]
    groups = make_groups(specs, config.scheduler.block_size)
    scheduler = replace(config.scheduler, kv_cache_groups=groups)
    return replace(config, kv_dtype=kv_dtype, scheduler=scheduler)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one rank with one variant of the settings. `config`: with memory for everything."""

    config: EngineConfig
    memory: Memory
    pool: PoolShape
    max_model_len: int

    @property
    def num_blocks(self) -> int:
        """Blocks that fit, the null block included."""
        return max(0, self.memory.left) // self.pool.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of one sequence that fit."""
        return self.pool.longest_sequence(max(0, self.num_blocks - 1), UNLIMITED_BYTES)

    @property
    def per_request(self) -> int:
        """Blocks of a request of full length."""
        return self.pool.peak_blocks(self.max_model_len)

    @property
    def num_fitting(self) -> int:
        """Requests of full length that fit."""
        return max(0, self.num_blocks - 1) // self.per_request

    @property
    def num_running(self) -> int:
        """Requests of full length that run at once."""
        return min(self.num_fitting, self.config.scheduler.max_num_seqs)


def plan_memory(config: EngineConfig, hardware: Hardware, variant: Variant, num_tokens: int = 0) -> MemoryPlan:
    """Plan the memory of a rank. `config`: of its share; `num_tokens`: of the largest step, 0: the budget."""
    options = replace(
        config.options,
        gpu_memory_utilization=variant.gpu_memory_utilization,
        kv_cache_dtype=variant.kv_dtype,
        max_num_seqs=variant.max_num_seqs,
        max_model_len=variant.max_model_len,
    )
    resolved = resolve_unlimited(options, hardware, config.model)
    budget = num_tokens or resolved.scheduler.max_num_batched_tokens
    memory = split_memory(options, hardware, config.model, resolved.dtype, resolved.weight_bytes, budget)
    pool = PoolShape(resolved.scheduler.kv_cache_groups, resolved.scheduler.block_size, budget)
    wanted = wanted_kv_bytes(options, pool, wanted_model_len(options, config.model))
    memory = keep_experts_on_disk(options, config.model, memory, wanted, [])
    return MemoryPlan(resolved, memory, pool, variant.max_model_len)


def kv_section(rank: RankModel, config: EngineConfig, settings: Settings) -> Section:
    """Return the bytes of the KV cache per token and layer, per token, and of requests."""
    section = Section("KV cache")
    groups, stored = config.scheduler.kv_cache_groups, rank_specs(rank, config)
    per_layer = sorted({spec.bytes_per_token for spec in stored})
    for spec in dict.fromkeys(stored):
        scales = f" + {spec.scale_bytes}" if getattr(spec, "scale_bytes", 0) else ""
        window = f", window {spec.window}" if spec.window else ""
        if isinstance(spec, PagedKV):
            formula = f"2 · KV heads · (head size · bytes{' + scale' if scales else ''})"
            values = f"2 · {spec.num_kv_heads} · ({spec.head_size} · {spec.dtype_bytes}{scales})"
        elif isinstance(spec, LatentKV):
            formula = f"(rank + rotary part) · bytes{' + scale' if scales else ''}"
            values = f"({spec.rank} + {spec.rotary_size}) · {spec.dtype_bytes}{scales}"
        else:
            formula, values = "0: a state of fixed size", ""
        name = f"per token and layer{window}"
        section.quantities.append(Quantity(name, spec.bytes_per_token, "B", formula, values))
    per_token = sum(spec.bytes_per_token for spec in stored)
    layers = f"{len(stored)} · {per_layer[0]}" if len(per_layer) == 1 else "Σ of the layers"
    section.quantities.append(Quantity("per token", per_token, "B", "layers · bytes", layers))
    for streams in dict.fromkeys((1, *settings.batches)):
        # A window keeps no more than its tokens.
        total = streams * sum(min(settings.ctx, spec.window or settings.ctx) * spec.bytes_per_token for spec in stored)
        name = f"{streams} request{'s' * (streams > 1)} of {settings.ctx} tokens"
        formula, values = "requests · tokens · bytes per token", f"{streams} · {settings.ctx} · {per_token}"
        if total != streams * settings.ctx * per_token:
            formula, values = (
                "requests · Σ of the layers, min(tokens, window) · bytes per token",
                f"{streams} · {total // streams}",
            )
        section.quantities.append(Quantity(name, total, "B", formula, values))
    section.notes.append(
        f"{len(groups)} group{'s' * (len(groups) > 1)} of layers, blocks of {config.scheduler.block_size} tokens"
    )
    return section


def rank_specs(rank: RankModel, config: EngineConfig) -> list[CacheSpec]:
    """Return each layer's cache as this rank stores it."""
    groups = config.scheduler.kv_cache_groups
    whole_specs = [groups[index].spec for index in config.scheduler.layer_groups]
    return [
        spec.stored_as(whole.dtype_bytes, whole.scale_bytes) if isinstance(whole, (PagedKV, LatentKV)) else spec
        for spec, whole in zip(rank.cache_specs, whole_specs, strict=True)
    ]


def memory_section(plan: MemoryPlan, settings: Settings) -> Section:
    """Return the memory plan of a rank: as `resolve` makes it, or the reason why there is none and what fits."""
    memory, pool, config = plan.memory, plan.pool, plan.config
    hardware, options, length = memory.hardware, config.options, plan.max_model_len
    section = Section(f"Memory plan ({hardware.name or hardware.device})")
    wanted = max(settings.batches)
    longest = pool.longest_sequence(max(0, plan.num_blocks - 1) // wanted, config.model.context_len)
    is_cpu = hardware.device == "cpu"
    share = (
        ("available",)
        if is_cpu
        else ("memory · share", f"{hardware.total_memory_bytes} · {options.gpu_memory_utilization}")
    )
    section.quantities += [
        Quantity("usable", memory.usable, "B", *share),
        Quantity("weights", memory.weights, "B", "those that a token reads" if memory.weights_on_disk else ""),
        Quantity(
            "activations and overhead",
            memory.activations,
            "B",
            f"upper bound of a step of {pool.max_num_batched_tokens} tokens",
        ),
        *([Quantity("adapters", memory.adapters, "B", "lora_bytes")] if memory.adapters else []),
        Quantity(
            "left for KV",
            memory.left,
            "B",
            f"usable - weights - activations and overhead{' - adapters' * bool(memory.adapters)}",
        ),
        Quantity(
            "KV tokens that fit",
            plan.num_tokens,
            "tokens",
            "blocks · tokens of a block",
            f"{plan.num_blocks} · {pool.block_size}, blocks of {pool.block_bytes} B, the null block left out",
        ),
        Quantity(
            f"requests of {length} tokens that fit",
            plan.num_fitting,
            "",
            "(blocks - 1) // blocks of a request",
            f"({plan.num_blocks} - 1) // {plan.per_request}",
        ),
    ]
    if is_foreign(options, hardware):
        section.notes.append(
            f"this engine stores {config.kv_dtype} KV on CPUs only: the figures are those of a kernel that reads it on "
            f"{hardware.name or hardware.device}"
        )
    else:
        section.notes.append(_default_note(section, plan))
    if is_cpu and options.gpu_memory_utilization != DEFAULT_UTILIZATION:
        section.notes.append(
            f"gpu_memory_utilization={options.gpu_memory_utilization} has no effect on a CPU: the engine's "
            "kv_cache_memory_bytes chooses the memory for KV"
        )
    if 0 < plan.num_fitting < wanted:
        name = "--ctx" if length == settings.ctx else "--max-model-len"
        section.notes.append(
            f"--batch {wanted} does not fit at {name} {length}: --batch {plan.num_fitting} or {name} {longest} fits; "
            "--kv-dtype int8 halves a 16-bit KV cache"
        )
    if settings.tp == 1 and memory.left <= 0 and wanted:
        weights = format_bytes(memory.weights // 2)
        section.notes.append(f"--tp 2 would leave {weights} of weights on each of two devices")
    return section


def _default_note(section: Section, plan: MemoryPlan) -> str:
    """Return what the engine would do. Mutates: section, if it would leave weights on disk."""
    options = plan.config.options
    try:
        decided = resolve(options, plan.memory.hardware, plan.config.model)
    except CapacityError as error:
        return f"the engine's default is refused: {error}" if plan.num_fitting else f"does not fit: {error}"
    if decided.weights_on_disk:
        section.quantities += _on_disk(decided)
    reason = next(item.reason for item in decided.decisions if item.name == "num_blocks")
    return f"by default the engine takes {decided.scheduler.num_blocks} blocks: {reason}"


def _on_disk(config: EngineConfig) -> list[Quantity]:
    """Return the bytes of weights that are larger than memory, and the share of experts that tokens wait for."""
    mapped, limit = mapped_bytes(config), min(mapped_limit(config), mapped_bytes(config))
    of_experts = round(mapped * config.model.expert_share)
    dense, chosen = mapped - of_experts, round(of_experts * config.model.chosen_share)
    missing = 1 - max(0, limit - dense) / of_experts
    return [
        Quantity("weights mapped from disk", mapped, "B", "dense + experts", f"{dense} + {of_experts}"),
        Quantity("of these in memory at most", limit, "B", "usable - activations and overhead - the default's KV"),
        Quantity(
            "experts that a token chooses",
            chosen,
            "B",
            "experts · share chosen",
            f"{of_experts} · {config.model.chosen_share:.4g}",
        ),
        Quantity(
            "of these read from disk",
            round(missing * chosen),
            "B",
            "chosen · (experts - in memory) / experts",
            f"{chosen} · {missing:.4g}, if tokens choose all experts alike",
        ),
    ]


def settings_section(config: EngineConfig, rank: RankModel, device: Device, settings: Settings) -> Section:
    """Return settings side by side: what fits with each, and what a remedy costs.

    The rate is that of the floor of a decode in which all requests that fit, at most `max_num_seqs`, have full length.
    """
    variants = settings.variants()
    asked, is_cpu = variants[0], device.hardware.device == "cpu"
    if len(variants) == 1:
        variants += remedies(asked, is_cpu=is_cpu)
    section = Section(
        "Settings side by side",
        header=(
            "memory share",
            "KV type",
            "sequences",
            "length",
            "usable",
            "step",
            "left for KV",
            "KV tokens",
            "fit",
            "tokens/s at most",
            "price",
        ),
        units=("text", "text", "count", "count", "B", "B", "B", "count", "count", "count", "text"),
    )
    for variant in variants:
        plan = plan_memory(config, device.hardware, variant)
        running, rate = plan.num_running, 0
        if running:
            decodes = ((variant.max_model_len - 1, 1),) * running
            step = StepShape(decodes, running, KV_FORMATS[plan.config.kv_dtype], plan.config.tile_rows)
            rate = round(running / Phase("", step, config, rank, device).floor_s)
        section.rows.append(
            (
                "-" if is_cpu else f"{variant.gpu_memory_utilization:g}",
                plan.config.kv_dtype,
                variant.max_num_seqs,
                variant.max_model_len,
                plan.memory.usable,
                plan.memory.activations,
                max(0, plan.memory.left),
                plan.num_tokens,
                plan.num_fitting,
                rate,
                price(asked, variant),
            )
        )
    section.notes.append(
        "fit: requests of that length; tokens/s: as many as may run, each step as fast as the device's limits allow"
    )
    return section


def activation_section(config: EngineConfig, rank: RankModel, hardware: Hardware, settings: Settings) -> Section:
    """Return the activations of a step by its number of tokens, which is why prompts are computed in chunks."""
    budget, variant = config.scheduler.max_num_batched_tokens, settings.variants()[0]
    asked = {budget, settings.ctx, settings.chunk or settings.ctx}
    lengths = sorted(asked | {length for length in STEP_LENGTHS if length <= max(asked)})
    name, _ = largest_activation(rank, config, 1)
    section = Section(
        "Activations by tokens of a step",
        header=(
            "tokens",
            f"largest ({name})",
            "scores, if written",
            "a step in all",
            "left for KV",
            f"requests of {variant.max_model_len}",
        ),
        units=("count", "B", "B", "B", "B", "count"),
    )
    for length in lengths:
        plan = plan_memory(config, hardware, variant, length)
        section.rows.append(
            (
                length,
                largest_activation(rank, config, length)[1],
                score_bytes(config, length, settings.ctx),
                plan.memory.activations,
                max(0, plan.memory.left),
                plan.num_fitting,
            )
        )
    section.notes.append(
        f"scores: heads · tokens · {settings.ctx} positions · bytes, in one layer; paged attention never stores them"
    )
    return section


def largest_activation(rank: RankModel, config: EngineConfig, num_tokens: int) -> tuple[str, int]:
    """Return the largest value between two operations of a layer, and its bytes with `num_tokens` rows."""
    found: list[tuple[int, str]] = []
    for instruction in rank.body:
        weight = instruction.named_weight
        name = type(instruction).__name__ if weight is None else rank.role_of(weight)
        product = instruction.product
        if config.uses_plan:
            found += [(buffer.row_bytes, name) for buffer in instruction.buffers]
        elif product is not None:
            num_values = product.weight.shape[0] // product.num_experts * product.num_active
            found.append((num_values * DTYPES[config.dtype], name))
    row_bytes, name = max(found, key=lambda item: item[0])
    return name, row_bytes * num_tokens


def score_bytes(config: EngineConfig, num_tokens: int, ctx: int) -> int:
    """Bytes of the matrix of scores of one layer, all heads, if it was stored."""
    return (
        config.model.num_heads * num_tokens * max(num_tokens, ctx) * (4 if config.uses_plan else DTYPES[config.dtype])
    )


def chunk_section(config: EngineConfig, rank: RankModel, device: Device, settings: Settings, chunk: int) -> Section:
    """Return a prompt chunk by chunk: FLOPs, scores, activations, and the KV cache behind each."""
    bounds = [*range(0, settings.ctx, chunk), settings.ctx]
    per_token = sum(spec.bytes_per_token for spec in rank_specs(rank, config))
    section = Section(
        f"Prompt of {settings.ctx} tokens in chunks of {chunk}",
        header=(
            "positions",
            "tokens",
            "FLOPs",
            "QKᵀ of a layer",
            "largest activation",
            "scores, if written",
            "KV cache after it",
            "at least",
        ),
        units=("text", "count", "FLOP", "FLOP", "B", "B", "B", "s"),
    )
    phases: list[Phase] = []
    for start, end in pairwise(bounds):
        step = StepShape(
            ((start, end - start),), int(end == settings.ctx), KV_FORMATS[config.kv_dtype], config.tile_rows
        )
        phases.append(Phase(f"{start}-{end - 1}", step, config, rank, device))
        section.rows.append(
            (
                phases[-1].name,
                end - start,
                phases[-1].flops,
                phases[-1].layer_score_flops,
                largest_activation(rank, config, end - start)[1],
                score_bytes(config, end - start, end),
                end * per_token,
                phases[-1].floor_s,
            )
        )
    columns: list[Sequence[int]] = list(zip(*(row[1:] for row in section.rows), strict=True))
    totals = [sum(columns[0]), sum(columns[1]), sum(columns[2]), max(columns[3]), max(columns[4]), columns[5][-1]]
    section.rows.append(("all", *totals, sum(phase.floor_s for phase in phases)))
    whole = largest_activation(rank, config, settings.ctx)[1]
    section.notes.append(
        f"whole, the largest activation would take {format_bytes(whole)}, and the scores of a layer "
        f"{format_bytes(score_bytes(config, settings.ctx, settings.ctx))}"
    )
    return section
