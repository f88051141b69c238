"""`measure`: the real model in this process, its memory and the times of its steps, beside what was predicted; and
`calibrate`: the achieved rates of this machine's kernels, from which times are predicted.

Times of a model come from the engine's event log, as every other view of them. Next to read: `explanation.py`,
`device.py`.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from quire import _native
from quire.config import EngineConfig, EngineOptions
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.events import EventKind
from quire.files import make_directory, replace_file
from quire.insight.explain.device import Calibration, calibration_path
from quire.insight.explain.report import Quantity, Section
from quire.kernels.instruction import Cost, Instruction, StepShape
from quire.models.registry import ModelRegistry
from quire.parallel.executor import InProcessExecutor
from quire.resolve import resolve
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.hardware import detect_hardware
from quire.runtime.machine_limits import measure_limits, read_rate
from quire.runtime.plan.emit import BODY, LOGITS, PlanLimits, PlannedModel
from quire.runtime.plan.load import load_plan
from quire.runtime.worker import KV_FORMATS, kv_layers
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import Checkpoint
from quire.weights.sources import ModelFiles

if TYPE_CHECKING:
    from quire.insight.explain.explanation import Explained
    from quire.insight.explain.subject import Settings

NUM_DECODED = 32
"""Tokens generated per stream; half of them before, half after the context that is asked for."""
PROCESS_BYTES, TOKENIZER_BYTES = 10_000_000, 450
"""Memory of an engine beside the model, and of a tokenizer per token of the vocabulary: SmolLM2's 49,152 take 22 MB."""


def decode_seconds(engine: LLMEngine, num_streams: int, num_prompt: int, num_decoded: int = NUM_DECODED) -> float:
    """Return the median seconds of a decode iteration of `num_streams` requests together."""
    events = _run(engine, num_streams, num_prompt, num_decoded)
    found = [
        data["duration_s"] / data["num_iterations"]
        for data in events
        if not data["has_prompts"] and data["num_requests"] == num_streams
    ]
    return float(statistics.median(found))


def prefill_seconds(engine: LLMEngine, num_prompt: int) -> float:
    """Return the median seconds of the steps that compute one prompt, of five."""
    found = [sum(data["duration_s"] for data in _run(engine, 1, num_prompt, 1)) for _ in range(5)]
    return float(statistics.median(found))


def _run(engine: LLMEngine, num_streams: int, num_prompt: int, num_decoded: int) -> list[dict[str, Any]]:
    """Run requests of random tokens to their end; returns the data of the STEP events."""
    generator, seen = random.Random(num_prompt), engine.events.num_recorded
    params = SamplingParams(temperature=0.0, max_tokens=num_decoded, ignore_eos=True, detokenize=False)
    for index in range(num_streams):
        ids = [generator.randrange(engine.config.model.vocab_size) for _ in range(num_prompt)]
        engine.add_request(f"explain-{index}", {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return [event.data for event in engine.events.since(seen) if event.kind is EventKind.STEP]


def measure(explained: "Explained", checkpoint: Checkpoint, settings: "Settings") -> None:
    """Add measured figures to the report. Mutates: explained.report.

    Raises: ConfigError where the model cannot be measured: without weights, for several ranks or another machine.
    """
    config, rank = explained.config, explained.rank
    if not checkpoint.tensors or settings.tp > 1 or config.device != "cpu" or not config.uses_plan:
        raise ConfigError(
            "--measure runs the model here as a plan: it needs weights, --tp 1 and --device cpu; leave it out, or give"
            " a model with weights"
        )

    streams, half = max(settings.batches), NUM_DECODED // 2
    num_prompt = max(1, settings.ctx - half)
    len_needed = max(settings.ctx, num_prompt + NUM_DECODED)
    block_size = config.scheduler.block_size
    num_blocks = 1 + streams * -(-len_needed // block_size)
    options = EngineOptions.from_kwargs(
        checkpoint.files.name,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_dtype,
        quantization=settings.quantization,
        max_model_len=len_needed,
        max_num_seqs=streams,
        num_blocks_override=num_blocks,
        device="cpu",
        enable_prefix_caching=False,
        speculative="off",
    )
    gc.collect()
    before = psutil.Process().memory_info().rss
    engine = LLMEngine.build(options)
    try:
        times = [prefill_seconds(engine, settings.ctx)]
        times += [decode_seconds(engine, count, num_prompt) for count in settings.batches]
        gc.collect()
        grown = psutil.Process().memory_info().rss - before
        pool_bytes = (
            num_blocks
            * config.scheduler.block_size
            * sum(len(group.layer_indices) * group.spec.bytes_per_token for group in config.scheduler.kv_cache_groups)
        )
        rows = min(engine.config.scheduler.max_num_batched_tokens, max(settings.ctx, streams * num_prompt))
    finally:
        engine.shutdown()
    buffers, overhead = rank.buffer_row_bytes * rows, PROCESS_BYTES + TOKENIZER_BYTES * config.model.vocab_size
    predicted = rank.weight_bytes + pool_bytes + buffers + overhead
    section = Section(
        "Measured", header=("", "floor", "predicted", "measured", "error"), units=("text", "s", "text", "s", "text")
    )
    section.quantities = [
        Quantity(
            "memory, predicted",
            predicted,
            "B",
            "weights + KV + buffers of a step + overhead",
            f"{rank.weight_bytes} + {pool_bytes} + {buffers} + {overhead}",
        ),
        Quantity("memory, measured", grown, "B", "growth of the resident set", _error(predicted, grown)),
    ]
    for phase, seconds in zip(explained.phases, times, strict=False):
        shown, error = "not calibrated", ""
        if phase.predicted_s is not None:
            shown, error = Quantity("", phase.predicted_s, "s").shown, _error(phase.predicted_s, seconds)
        section.rows.append((phase.name, phase.floor_s, shown, seconds, error))
    explained.report.sections.append(section)


def _error(predicted: float, measured: float) -> str:
    return f"predicted is {100 * (predicted / measured - 1):+.1f} %"


# --- Calibration, in about a minute: generic shapes with random weights, timed within their plans ---

WIDTH, HEAD_SIZE, VOCABULARY = 1024, 64, 4096
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
MAX_REQUESTS = 32
CONTEXT = 512
WORKING_SETS = tuple(2**n << 20 for n in range(2, 10))
"""4 MiB to 512 MiB."""
REPETITIONS, SECONDS = 9, 0.4
"""Most runs per figure, and seconds after which no other run starts; the first run does not count."""


@dataclass(frozen=True, slots=True)
class MeasuredVariant:
    """A model to time: its types, KV heads of 16 query heads, and layers, so that it has about 100 MB of weights."""

    dtype: str
    quantization: str | None
    kv_dtype: str
    num_kv_heads: int
    num_layers: int


VARIANTS = (
    MeasuredVariant("bfloat16", "int4", "bfloat16", 4, 12),
    MeasuredVariant("bfloat16", "int8", "bfloat16", 16, 7),
    MeasuredVariant("bfloat16", None, "bfloat16", 2, 4),
    MeasuredVariant("float32", None, "float32", 4, 2),
    MeasuredVariant("float16", None, "float16", 4, 4),
    MeasuredVariant("bfloat16", "int4", "int8", 4, 12),
)

Times = NDArray[np.float64]


class TimedModel:
    """A planned model with random weights, whose steps can be timed instruction by instruction."""

    def __init__(self, variant: MeasuredVariant) -> None:
        config, checkpoint = generic(
            WIDTH,
            variant.num_layers,
            variant.num_kv_heads,
            dtype=variant.dtype,
            quantization=variant.quantization,
            kv_cache_dtype=variant.kv_dtype,
        )
        self.cache = CacheEngine(config)
        self.cache.memory[:] = 0
        program, weights = load_plan(config, checkpoint, self.cache.layer_groups)
        limits = PlanLimits(config.scheduler.max_num_batched_tokens, MAX_REQUESTS, MAX_REQUESTS, config.tile_rows)
        self.planned = PlannedModel(
            program, weights, kv_layers(config, self.cache), limits, config.hardware.num_threads
        )
        self.weight_bytes = weights.num_bytes
        self.kv_format = KV_FORMATS[variant.kv_dtype]
        blocks = 2 * CONTEXT // config.scheduler.block_size
        self._tables = np.arange(1, 1 + MAX_REQUESTS * blocks, dtype=np.int32).reshape(1, MAX_REQUESTS, blocks)
        self._known: dict[tuple[int, int, int], tuple[StepShape, Times]] = {}
        self._tokens = np.zeros((MAX_REQUESTS, 2 * CONTEXT), np.int32)

    def time(self, num_requests: int, start: int, count: int) -> tuple[StepShape, Times]:
        """Return the step and the lower quartile of the seconds of each of `planned.ops`; 0 if it did not run."""
        known = self._known.get((num_requests, start, count))
        if known is not None:
            return known
        rows, counts = np.arange(num_requests, dtype=np.int32), np.full(num_requests, count, np.int32)
        starts, last = np.full(num_requests, start, np.int32), np.cumsum(counts, dtype=np.int32) - 1
        found: list[NDArray[np.int64]] = []
        end = time.perf_counter() + SECONDS
        while len(found) < 2 or (len(found) <= REPETITIONS and time.perf_counter() < end):
            nanoseconds = np.zeros(len(self.planned.ops), np.int64)
            arrays = (rows, starts, counts, last.astype(np.int32), self._tokens, self._tables)
            self.planned.run(BODY | LOGITS, *arrays, nanoseconds=nanoseconds)
            found.append(nanoseconds)
        requests = ((start, count),) * num_requests
        timed = (
            StepShape(requests, num_requests, self.kv_format, self.planned.limits.tile_rows),
            np.percentile(found[1:], 25, axis=0) / 1e9,
        )
        self._known[num_requests, start, count] = timed
        return timed

    def select(self, times: Times, is_chosen: Callable[[Instruction], bool]) -> list[tuple[Instruction, float]]:
        """Return the chosen instructions that ran, with their seconds."""
        pairs = zip(self.planned.ops, times.tolist(), strict=True)
        return [(op, seconds) for op, seconds in pairs if is_chosen(op) and seconds > 0]


def generic(width: int, num_layers: int, num_kv_heads: int, **options: Any) -> tuple[EngineConfig, Checkpoint]:
    """Return a Llama of these sizes with random weights, for MAX_REQUESTS requests of 2 · CONTEXT tokens."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": width // HEAD_SIZE,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4 * CONTEXT,
        "tie_word_embeddings": True,
    }
    chosen = EngineOptions.from_kwargs(
        "generic",
        load_format="dummy",
        device="cpu",
        max_model_len=2 * CONTEXT,
        max_num_seqs=MAX_REQUESTS,
        num_blocks_override=1 + MAX_REQUESTS * 2 * CONTEXT // 32,
        enable_prefix_caching=False,
        block_size=32,
        **options,
    )
    config = resolve(chosen, detect_hardware("cpu"), ModelRegistry.make_model_config(fields))
    return config, Checkpoint(ModelFiles("generic", Path("generic"), "hf", "generic"), fields)


def calibrate(report: Callable[[str], None] = lambda text: None) -> Calibration:
    """Measure this machine and keep the result in the cache directory. `report` is told of each part."""
    hardware = detect_hardware("cpu")
    report("limits of memory and arithmetic")
    limits = measure_limits("cpu", ("int8", "bf16", "fp32"))
    read = [(size, read_rate(size)) for size in WORKING_SETS]
    products: dict[str, list[tuple[int, float]]] = {}
    decodes: dict[str, list[tuple[float, float, float]]] = {}
    prompts: dict[str, float] = {}
    others: dict[str, tuple[float, float]] = {}
    weight_bytes = 0
    for variant in VARIANTS:
        report(f"kernels of {variant.quantization or variant.dtype} weights and {variant.kv_dtype} KV")
        model = TimedModel(variant)
        weight_bytes = max(weight_bytes, model.weight_bytes)
        _time_products(model, products)
        name = model.kv_format.name
        decodes.setdefault(name, []).extend(_time_decodes(model))
        prompts.setdefault(name, _time_prompt(model))
        if not others:
            others = _time_others(model)
    report("scheduling and sampling")
    attention = {name: (*_fit(samples), prompts[name]) for name, samples in decodes.items()}
    for name, measured in (
        *((name, "q4m") for name in ("q4", "q5", "q5m", "q4k", "q5k", "mxfp4", "nvfp4")),
        *((name, "q8") for name in ("q6k", "iq4nl", "iq4xs")),
    ):
        if measured in products:
            products.setdefault(name, products[measured])
    found = Calibration(
        hardware.name,
        hardware.num_threads,
        _native.isa(),
        dict(limits.flops_per_s),
        weight_bytes,
        read,
        products,
        attention,
        others,
        _time_host(),
    )
    path = calibration_path()
    make_directory(path.parent)
    replace_file(path, [msgspec.json.encode(found)])
    return found


def _time_products(model: TimedModel, products: dict[str, list[tuple[int, float]]]) -> None:
    """Add seconds per FLOP of the layers' products by number of rows."""
    curve: list[tuple[int, float]] = []
    name = ""
    for rows in ROWS:
        step, times = model.time(rows, 0, 1) if rows <= MAX_REQUESTS else model.time(1, 0, rows)
        pairs = model.select(times, _is_product_of_layer)
        name = next(op.product.packing.name for op, _ in pairs if op.product is not None)
        curve.append((rows, sum(seconds for _, seconds in pairs) / sum(op.cost(step).flops for op, _ in pairs)))
    products.setdefault(name, curve)


def _is_product_of_layer(op: Instruction) -> bool:
    return op.product is not None and op.product.weight.shape[0] != VOCABULARY


def _time_decodes(model: TimedModel) -> list[tuple[float, float, float]]:
    """Return (bytes, FLOPs, seconds) that a context of CONTEXT tokens adds to a step, whose products fetch keys."""
    samples: list[tuple[float, float, float]] = []
    for num_requests in (1, 8, MAX_REQUESTS):
        whole = []
        for start in (0, CONTEXT):
            step, times = model.time(num_requests, start, 1)
            costs = [op.cost(step) for op, _ in model.select(times, lambda op: op.is_attention)]
            whole.append((sum(c.bytes_read for c in costs), sum(c.flops for c in costs), float(times.sum())))
        (few_bytes, few_flops, little), (num_bytes, flops, seconds) = whole
        samples.append((num_bytes - few_bytes, flops - few_flops, max(seconds - little, 0.0)))
    return samples


def _time_prompt(model: TimedModel) -> float:
    step, times = model.time(1, 0, CONTEXT)
    pairs = model.select(times, lambda op: op.is_attention)
    return sum(seconds for _, seconds in pairs) / float(sum(op.cost(step).flops for op, _ in pairs))


def _time_others(model: TimedModel) -> dict[str, tuple[float, float]]:
    """Return per class of the remaining instructions seconds per op and per unit of work, from 1 and CONTEXT rows."""
    points: dict[str, list[tuple[float, float]]] = {}
    for rows in (1, CONTEXT):
        step, times = model.time(1, 0, rows)
        by_name: dict[str, list[tuple[Cost, float]]] = {}
        for op, seconds in model.select(times, lambda op: op.product is None and not op.is_attention):
            by_name.setdefault(type(op).__name__, []).append((op.cost(step), seconds))
        for name, pairs in by_name.items():
            work = float(np.mean([cost.flops + cost.num_bytes for cost, _ in pairs]))
            points.setdefault(name, []).append((work, float(np.mean([seconds for _, seconds in pairs]))))
    found = {}
    for name, ((few, quick), (many, slow)) in ((name, pair) for name, pair in points.items() if len(pair) == 2):
        per_work = max(0.0, (slow - quick) / (many - few)) if many > few else 0.0
        found[name] = (max(0.0, quick - per_work * few), per_work)
    return found


def _time_host() -> tuple[float, float]:
    """Return seconds per decode iteration and per request of it, of an engine whose model takes next to no time."""
    config, checkpoint = generic(HEAD_SIZE, 1, 1)
    engine = LLMEngine(config, InProcessExecutor.create(config, checkpoint))
    one, many = (decode_seconds(engine, count, 16, 64) for count in (1, MAX_REQUESTS))
    engine.shutdown()
    per_request = max(0.0, (many - one) / (MAX_REQUESTS - 1))
    return max(0.0, one - per_request), per_request


def _fit(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return seconds per byte and per FLOP, neither below 0, with the least squared relative errors."""
    rows = [(num_bytes / seconds, flops / seconds) for num_bytes, flops, seconds in samples if seconds > 0]
    if not rows:
        return 0.0, 0.0
    matrix, ones = np.array(rows), np.ones(len(rows))
    best, *_ = np.linalg.lstsq(matrix, ones, rcond=None)
    if (best >= 0).all():
        return float(best[0]), float(best[1])
    alone = [float(column @ ones / (column @ column)) for column in matrix.T]
    errors = [float(((column * value - 1) ** 2).sum()) for column, value in zip(matrix.T, alone, strict=True)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
