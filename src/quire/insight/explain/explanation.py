"""`explain`: a checkpoint and settings to a `Report`: parameters, weights, KV cache, memory, work of phases, adapters.

Adds up what the engine's own parts say: instructions their cost, cache specs their bytes, `resolve` and `memory_plan`
the memory. Next to read: `subject.py`, then `phases.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from quire.config import EngineConfig, EngineOptions, ModelConfig
from quire.engine.build import resolve_config
from quire.errors import ConfigError, ModelFileError, QuireError, UnsupportedModelError
from quire.insight.explain.device import Device, find_device
from quire.insight.explain.memory import (
    UNLIMITED_BYTES,
    activation_section,
    chunk_section,
    kv_section,
    memory_section,
    plan_memory,
    resolve_unlimited,
    settings_section,
)
from quire.insight.explain.phases import Phase, phase_section
from quire.insight.explain.report import Quantity, Report, Section
from quire.insight.explain.subject import MAX_CHUNKS, STORED, RankModel, Settings, trace_rank
from quire.insight.picture import counted
from quire.kernels.instruction import StepShape
from quire.kernels.tracing import NotTraceableError
from quire.lazy_torch import on_meta
from quire.models.registry import ModelRegistry
from quire.runtime.adapter_layout import AdapterLayout, linear_shapes, num_parameters
from quire.runtime.hardware import detect_hardware
from quire.runtime.loader import make_model, weigh
from quire.runtime.worker import KV_FORMATS
from quire.sampling_params import SamplingParams
from quire.weights.adapter_files import MAX_RANK, read_adapter
from quire.weights.checkpoint import Checkpoint


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
    model = weigh(model, checkpoint.tensors)
    notes = _notes(settings, model, checkpoint)
    model = replace(model, context_len=max(model.context_len, settings.longest))
    device, variants = find_device(settings.device), settings.variants()
    first = variants[0]
    num_rows = max(first.max_num_seqs, *settings.batches)
    options = EngineOptions(
        model=checkpoint.files.name,
        dtype=settings.dtype,
        kv_cache_dtype=first.kv_dtype,
        quantization=settings.quantization,
        max_model_len=first.max_model_len,
        max_num_seqs=first.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens or max(2048, num_rows),
        block_size=settings.block_size,
        gpu_memory_utilization=first.gpu_memory_utilization,
        load_format="auto" if checkpoint.tensors else "dummy",
        enable_lora=bool(settings.lora),
    )
    config = resolve_unlimited(options, device.hardware, model)
    rank = trace_rank(config, checkpoint, settings.tp)
    phases = tuple(
        Phase(name, step, config, rank, device, SamplingParams(**model.generation_defaults))
        for name, step in steps(settings, KV_FORMATS[config.kv_dtype], config.tile_rows).items()
    )
    ranks = f" · rank 0 of {settings.tp}" if settings.tp > 1 else ""
    report = Report(
        f"{checkpoint.files.name} · {model.architecture} · {config.dtype}, KV {config.kv_dtype} · {device.name}{ranks}",
        {
            "model": checkpoint.files.name,
            "architecture": model.architecture,
            "origin": checkpoint.files.origin,
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_dtype,
            "device": device.name,
            "tp": settings.tp,
            "batch": list(settings.batches),
            "ctx": settings.ctx,
            "chunk": settings.chunk,
        },
        notes,
    )
    share = replace(config, model=rank.share_of(model, is_stored=bool(checkpoint.tensors), tp=settings.tp))
    chunks = () if settings.chunk is None else (chunk_section(share, rank, device, settings, settings.chunk),)
    lora = [adapters_section(settings.lora, model.hf_config, rank, settings.batches)] if settings.lora else []
    report.sections = [
        _parameters(rank, model, settings.tp),
        _weights(rank),
        *lora,
        kv_section(rank, config, settings),
        memory_section(plan_memory(share, device.hardware, first), settings),
        settings_section(share, rank, device, settings),
        activation_section(share, rank, device.hardware, settings),
        _device(device),
        *(phase_section(phase, with_ops=with_ops) for phase in phases),
        *chunks,
    ]
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


def _notes(settings: Settings, model: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Return what a reader must know before the figures. Raises: ConfigError for lengths that contradict each other."""
    if settings.chunk is not None and settings.chunk > settings.ctx:
        raise ConfigError(f"--chunk {settings.chunk} exceeds --ctx {settings.ctx}: --chunk {settings.ctx} fits")
    if settings.chunk is not None and -(-settings.ctx // settings.chunk) > MAX_CHUNKS:
        raise ConfigError(
            f"--chunk {settings.chunk} cuts --ctx {settings.ctx} into more than {MAX_CHUNKS} chunks: --chunk "
            f"{-(-settings.ctx // MAX_CHUNKS)} fits"
        )
    if settings.max_model_len and settings.ctx > settings.max_model_len[0]:
        limit = settings.max_model_len[0]
        raise ConfigError(f"--ctx {settings.ctx} exceeds --max-model-len {limit}: --ctx {limit} fits")
    notes = []
    if settings.longest > model.context_len:
        notes.append(
            f"{settings.longest} tokens are more than the model's context of {model.context_len}: the figures hold, "
            "but the model was not trained for it, and the engine refuses it"
        )
    stored = checkpoint.metadata.get(STORED)
    if stored:
        method = stored.get("quant_method", "fewer bits") if isinstance(stored, dict) else "fewer bits"
        notes.append(f"the published weights are stored in {method}; without them, weights count in the compute dtype")
    return notes


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
        idle = sum(
            values[rank.names[id(one.weight)]] * (one.num_experts - one.num_active) // one.num_experts
            for one in experts
        )
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
    section = Section(
        "Weights",
        header=("weight", "count", "whole", "on this rank", "format", "bytes each", "bytes"),
        units=("text", "count", "text", "text", "text", "B", "B"),
    )
    section.quantities.append(Quantity("bytes on this rank", rank.weight_bytes, "B", "Σ count · bytes each"))
    for (role, whole, shape, found), sizes in rows.items():
        shown = ("×".join(map(str, whole)), "×".join(map(str, shape)))
        section.rows.append((role, len(sizes), *shown, found, sizes[0], sum(sizes)))
    return section


def _device(device: Device) -> Section:
    section = Section(f"Device: {device.name}")
    section.quantities.append(Quantity("memory read", device.limits.read_bytes_per_s, "B/s", device.source))
    if device.cache_bytes_per_s is not None:
        section.quantities.append(Quantity("cache read", device.cache_bytes_per_s, "B/s", "4 MiB again and again"))
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


# --- LoRA adapters: their bytes and work beside those of the model --------------------------------

BF16_BYTES = 2


def adapters_section(
    given: Sequence[str], hf_config: Mapping[str, Any], rank: RankModel, batches: Sequence[int]
) -> Section:
    """Return a row per adapter, and what steps read if each of their streams has another one.

    `given`: each a rank of a thought one on every linear layer, or NAME=PATH. Raises: ConfigError; ModelFileError,
    UnsupportedModelError for files that do not fit the model.
    """
    section = Section(
        "Adapters",
        header=("adapter", "rank", "layers", "parameters", "bytes in bf16", "FLOPs a token"),
        units=("text", "text", "count", "count", "B", "FLOP"),
    )
    sizes = []
    for item in given:
        name, ranks, num_layers, num_values = _measure(item, hf_config)
        sizes.append(num_values * BF16_BYTES)
        section.rows.append((name, ranks, num_layers, num_values, sizes[-1], 2 * num_values))
    mean = sum(sizes) // len(sizes)
    for streams in dict.fromkeys((1, *batches)):
        name = f"read by {streams} stream{'s' * (streams > 1)} with an adapter each"
        share = f"{streams} · {mean}, {streams * mean / rank.weight_bytes:.1%} of the weights"
        section.quantities.append(Quantity(name, streams * mean, "B", "streams · mean of the adapters' bytes", share))
    section.notes.append("streams with the same adapter read it once; --lora-bytes of memory stay free for adapters")
    return section


def _measure(item: str, hf_config: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Return name, rank, number of layers and of values."""
    if item.isdecimal():
        if not 1 <= int(item) <= MAX_RANK:
            raise ConfigError(f"--lora {item}: ranks from 1 to {MAX_RANK} are computed")
        shapes = linear_shapes(hf_config)
        return "any", item, len(shapes), num_parameters(shapes, int(item))
    name, _, path = item.partition("=")
    if not name or not path:
        raise ConfigError(f"--lora {item} is neither NAME=PATH nor a rank")
    if not Path(path).exists():
        raise ModelFileError(f"{path}: there is no such adapter; give PEFT's directory or a GGUF file")
    files = read_adapter(Path(path), hf_config)
    with on_meta():
        AdapterLayout(make_model(hf_config)).place(files)
    pairs = files.pairs.values()
    ranks = sorted({pair.rank for pair in pairs})
    return name, ", ".join(map(str, ranks)), len(pairs), sum(prod(pair.a.shape) + prod(pair.b.shape) for pair in pairs)
