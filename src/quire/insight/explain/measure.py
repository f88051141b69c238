"""`measure`: the real model in this process, its memory and the times of its steps, beside what was predicted.

Times come from the engine's event log, as every other view of them. Next to read: `explanation.py`.
"""

import gc
import random
import statistics
from typing import TYPE_CHECKING, Any

import psutil

from quire.config import EngineOptions
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.events import EventKind
from quire.insight.explain.report import Quantity, Section
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from quire.insight.explain.explanation import Explained
    from quire.insight.explain.settings import Settings

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
