"""`explain`: a checkpoint and settings to a `Report`: parameters, weights, KV cache, memory, work of each phase.

Adds up what the engine's own parts say: instructions their cost, cache specs their bytes, `resolve` and `memory_plan`
the memory. Next to read: `rank_model.py`, then `phases.py`.
"""

from dataclasses import dataclass, replace
from itertools import groupby

from quire.byte_sizes import format_bytes
from quire.cache_spec import LatentKV, PagedKV, PoolShape
from quire.config import EngineConfig, EngineOptions, Hardware, ModelConfig
from quire.engine.build import resolve_config
from quire.errors import CapacityError, ConfigError, QuireError, UnsupportedModelError
from quire.insight.explain.device import Device, find_device
from quire.insight.explain.phases import Phase, phase_section
from quire.insight.explain.rank_model import RankModel, trace_rank
from quire.insight.explain.report import Quantity, Report, Section
from quire.insight.picture import counted
from quire.kernels.instruction import StepShape
from quire.kernels.tracing import NotTraceableError
from quire.memory_plan import split_memory
from quire.models.registry import ModelRegistry
from quire.resolve import resolve
from quire.runtime.hardware import detect_hardware
from quire.runtime.plan.packed_weights import kept_bytes
from quire.runtime.worker import KV_FORMATS
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import Checkpoint

UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Settings:
    """The question: ranks, streams of a decode, tokens of context, tokens of a chunk beside decodes, types, device."""

    tp: int = 1
    batches: tuple[int, ...] = (1, 8, 32)
    ctx: int = 512
    chunk: int | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class Explained:
    """The report, and what it was made of."""

    report: Report
    config: EngineConfig
    rank: RankModel
    phases: tuple[Phase, ...]


def explain(checkpoint: Checkpoint, settings: Settings, *, with_ops: bool = False) -> Explained:
    """Explain a model on a device. `with_ops` adds a table of every operation to each phase.

    Raises: ModelError for a model that cannot be explained; ConfigError for settings that do not fit it.
    """
    model = ModelRegistry.make_model_config(checkpoint.hf_config, checkpoint.generation_config)
    if model.implementation != "quire":
        raise UnsupportedModelError(
            f"{model.architecture} is computed by Transformers' own module, whose work Quire does not know: explain"
            " needs a model that Quire implements (docs/models.md)"
        )
    if checkpoint.tensors:
        model = replace(model, stored_bytes=kept_bytes(checkpoint.tensors.values()))
    _check_lengths(settings, model)
    device = find_device(settings.device)
    options = EngineOptions(
        model=checkpoint.files.name, dtype=settings.dtype, kv_cache_dtype=settings.kv_dtype,
        quantization=settings.quantization, max_model_len=settings.ctx, max_num_seqs=max(settings.batches),
        max_num_batched_tokens=max(2048, *settings.batches), load_format="auto" if checkpoint.tensors else "dummy",
    )  # fmt: skip
    unlimited = replace(device.hardware, total_memory_bytes=UNLIMITED_BYTES, available_memory_bytes=UNLIMITED_BYTES)
    config = resolve(options, unlimited, model)
    rank = trace_rank(config, checkpoint, settings.tp)
    phases = tuple(
        Phase(name, step, config, rank, device, SamplingParams(**model.generation_defaults))
        for name, step in steps(settings, KV_FORMATS[config.kv_dtype], config.tile_rows).items()
    )
    ranks = f" · rank 0 of {settings.tp}" if settings.tp > 1 else ""
    report = Report(
        f"{checkpoint.files.name} · {model.architecture} · {config.dtype}, KV {config.kv_dtype} · {device.name}{ranks}",
        {"model": checkpoint.files.name, "architecture": model.architecture, "origin": checkpoint.files.origin,
         "dtype": config.dtype, "kv_cache_dtype": config.kv_dtype, "device": device.name, "tp": settings.tp,
         "batch": list(settings.batches), "ctx": settings.ctx, "chunk": settings.chunk},
    )  # fmt: skip
    report.sections = [
        _parameters(rank, model, settings.tp),
        _weights(rank),
        _kv_cache(rank, config, settings),
        _memory(rank, replace(config, model=rank.share_of(model, is_stored=bool(checkpoint.tensors), tp=settings.tp)),
                device.hardware, settings),
        _device(device),
        *(phase_section(phase, with_ops=with_ops) for phase in phases),
    ]  # fmt: skip
    return Explained(report, config, rank, phases)


def implementation_of(checkpoint: Checkpoint) -> str:
    """Return "quire" for a model that runs as a plan, "quire, op by op: …" with the reason, "transformers" for
    Transformers' own module, or "none: …" with the error of loading.
    """
    hardware = replace(
        detect_hardware("cpu"), total_memory_bytes=UNLIMITED_BYTES, available_memory_bytes=UNLIMITED_BYTES
    )
    try:
        config = resolve_config(EngineOptions(model=checkpoint.files.name, device="cpu"), checkpoint, hardware)
        if config.model.implementation == "quire":
            trace_rank(config, checkpoint, 1)
        return config.model.implementation
    except QuireError as error:
        if isinstance(error.__cause__, NotTraceableError):
            return f"quire, op by op: a plan cannot hold {error.__cause__}"
        return f"none: {error.message}"


def steps(settings: Settings, kv_format: object, tile_rows: int = 0) -> dict[str, StepShape]:
    """Return the phases by name: a prompt of ctx tokens, decodes in a context of ctx, a prompt's last chunk beside."""
    ctx, decode = settings.ctx, (settings.ctx - 1, 1)
    found = {f"prefill of {ctx} tokens": StepShape(((0, ctx),), 1, kv_format, tile_rows)}  # type: ignore[arg-type]
    for batch in settings.batches:
        name = f"decode of {batch} stream{'s' * (batch > 1)} at {ctx}"
        found[name] = StepShape((decode,) * batch, batch, kv_format, tile_rows)  # type: ignore[arg-type]
    if settings.chunk is not None:
        batch = max(settings.batches)
        requests = (*(decode,) * batch, (ctx - settings.chunk, settings.chunk))
        name = f"chunk of {settings.chunk} tokens beside {counted(batch, 'decode')}"
        found[name] = StepShape(requests, batch + 1, kv_format, tile_rows)  # type: ignore[arg-type]
    return found


def _check_lengths(settings: Settings, model: ModelConfig) -> None:
    if settings.ctx > model.context_len:
        raise ConfigError(
            f"--ctx {settings.ctx} exceeds the model's context of {model.context_len} tokens: --ctx {model.context_len}"
            " fits"
        )
    if settings.chunk is not None and settings.chunk > settings.ctx:
        raise ConfigError(f"--chunk {settings.chunk} exceeds --ctx {settings.ctx}: --chunk {settings.ctx} fits")


def _parameters(rank: RankModel, model: ModelConfig, tp: int) -> Section:
    tables = {w.name: w for w in rank.weights if w.whole_shape[0] == model.vocab_size and len(w.shape) == 2}
    in_layers: dict[int, int] = {}
    for weight in rank.weights:
        layer = weight.layer_and_role[0]
        if layer is not None:
            in_layers[layer] = in_layers.get(layer, 0) + weight.num_values
    section = Section("Parameters")
    size = sum(weight.num_values for weight in tables.values())
    shapes = " + ".join(
        f"{w.name.removesuffix('.weight')} {w.whole_shape[0]}·{w.whole_shape[1]}" for w in tables.values()
    )
    section.quantities.append(
        Quantity("total", model.num_parameters, "", "Σ of the shapes of all parameters, tied ones once")
    )
    products = [instruction.product for instruction in rank.body if instruction.product is not None]
    experts = [product for product in products if product.num_experts > 1]
    if experts:
        values = {weight.name: weight.num_values for weight in rank.weights}
        idle = sum(values[rank.names[id(one.weight)]] * (one.num_experts - one.num_active) // one.num_experts
                   for one in experts)  # fmt: skip
        used = f"{experts[0].num_active} of {experts[0].num_experts} experts of a layer"
        section.quantities.append(Quantity("active", model.num_parameters - idle, "", "of one token", used))
    section.quantities.append(Quantity("embedding and head", size, "", "vocabulary · width", shapes))
    for count, group in groupby(in_layers.items(), key=lambda item: item[1]):
        layers = [layer for layer, _ in group]
        which = f"layer {layers[0]}" if len(layers) == 1 else f"each of layers {layers[0]}-{layers[-1]}"
        section.quantities.append(Quantity(which, count, "", "Σ of the layer's shapes"))
    if tp > 1:
        section.quantities.append(Quantity("of this rank", rank.num_parameters, "", "Σ of its shares, see Weights"))
    return section


def _weights(rank: RankModel) -> Section:
    """Return the table of weights: a row per role, shape and format, which layers that are alike share."""
    rows: dict[tuple[str, tuple[int, ...], tuple[int, ...], str], list[int]] = {}
    for weight in rank.weights:
        key = (weight.layer_and_role[1].removesuffix(".weight"), weight.whole_shape, weight.shape, weight.format)
        rows.setdefault(key, []).append(weight.num_bytes)
    section = Section("Weights", header=("weight", "count", "whole", "on this rank", "format", "bytes each", "bytes"),
                      units=("text", "count", "text", "text", "text", "B", "B"))  # fmt: skip
    section.quantities.append(Quantity("bytes on this rank", rank.weight_bytes, "B", "Σ count · bytes each"))
    for (role, whole, shape, found), sizes in rows.items():
        shown = ("×".join(map(str, whole)), "×".join(map(str, shape)))
        section.rows.append((role, len(sizes), *shown, found, sizes[0], sum(sizes)))
    return section


def _kv_cache(rank: RankModel, config: EngineConfig, settings: Settings) -> Section:
    section = Section("KV cache")
    groups = config.scheduler.kv_cache_groups
    whole_specs = [groups[index].spec for index in config.scheduler.layer_groups]
    stored = [
        spec.stored_as(whole.dtype_bytes, whole.scale_bytes) if isinstance(whole, (PagedKV, LatentKV)) else spec
        for spec, whole in zip(rank.cache_specs, whole_specs, strict=True)
    ]
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
    section.notes.append(f"{len(groups)} group{'s' * (len(groups) > 1)} of layers, blocks of "
                         f"{config.scheduler.block_size} tokens")  # fmt: skip
    return section


def _memory(rank: RankModel, config: EngineConfig, hardware: Hardware, settings: Settings) -> Section:
    """The memory plan of this rank: as `resolve` makes it, or the reason why there is none and what fits."""
    section = Section(f"Memory plan ({hardware.name or hardware.device})")
    options, budget = config.options, config.scheduler.max_num_batched_tokens
    memory = split_memory(options, hardware, config.model, config.dtype, config.weight_bytes, budget)
    resolved = resolve(options, replace(hardware, total_memory_bytes=UNLIMITED_BYTES,
                                        available_memory_bytes=UNLIMITED_BYTES), config.model)  # fmt: skip
    pool = PoolShape(resolved.scheduler.kv_cache_groups, resolved.scheduler.block_size, budget)
    num_blocks = max(0, memory.left) // pool.block_bytes
    per_request = pool.peak_blocks(settings.ctx)
    fitting, wanted = max(0, num_blocks - 1) // per_request, max(settings.batches)
    longest = pool.longest_sequence(max(0, num_blocks - 1) // wanted, config.model.context_len)
    tokens = pool.longest_sequence(max(0, num_blocks - 1), UNLIMITED_BYTES)
    is_cpu = hardware.device == "cpu"
    share = ("available",) if is_cpu else (
        "memory · share", f"{hardware.total_memory_bytes} · {options.gpu_memory_utilization}"
    )  # fmt: skip
    section.quantities += [
        Quantity("usable", memory.usable, "B", *share),
        Quantity("weights", memory.weights, "B"),
        Quantity("activations and overhead", memory.activations, "B", f"upper bound of a step of {budget} tokens"),
        Quantity("left for KV", memory.left, "B", "usable - weights - activations and overhead"),
        Quantity("KV tokens that fit", tokens, "tokens", "blocks · tokens of a block",
                 f"{num_blocks} · {pool.block_size}, blocks of {pool.block_bytes} B, the null block left out"),
        Quantity(f"requests of {settings.ctx} tokens that fit", fitting, "", "(blocks - 1) // blocks of a request",
                 f"({num_blocks} - 1) // {per_request}"),
    ]  # fmt: skip
    try:
        decided = resolve(options, hardware, config.model)
        reason = next(item.reason for item in decided.decisions if item.name == "num_blocks")
        section.notes.append(f"by default the engine takes {decided.scheduler.num_blocks} blocks: {reason}")
    except CapacityError as error:
        section.notes.append(f"does not fit: {error}")
    if 0 < fitting < wanted:
        section.notes.append(f"--batch {wanted} does not fit at --ctx {settings.ctx}: --batch {fitting} or --ctx "
                             f"{longest} fits; --kv-dtype int8 halves a 16-bit KV cache on a CPU")  # fmt: skip
    if settings.tp == 1 and memory.left <= 0 and wanted:
        weights = format_bytes(memory.weights // 2)
        section.notes.append(f"--tp 2 would leave {weights} of weights on each of two devices")
    return section


def _device(device: Device) -> Section:
    section = Section(f"Device: {device.name}")
    section.quantities.append(Quantity("memory read", device.limits.read_bytes_per_s, "B/s", device.source))
    for name, rate in device.limits.flops_per_s.items():
        ridge = f"binds above {rate / device.limits.read_bytes_per_s:.4g} FLOP/B"
        section.quantities.append(Quantity(f"products in {name}", rate, "FLOP/s", "", ridge))
    if device.link_bytes_per_s is not None:
        section.quantities.append(Quantity("link to other ranks", device.link_bytes_per_s, "B/s", "one direction"))
    if device.calibration is None and device.hardware.device == "cpu":
        section.notes.append(
            "`quire doctor --calibrate` measures this machine's kernels once; then times are predicted"
        )
    return section
