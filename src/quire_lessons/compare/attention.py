"""MHA, GQA, MQA, MLA and a sliding window on one shape: bytes of the KV cache, and time of decode attention.

Sizes come from `cache_spec.py`. Times are those of the attention instruction in a plan of one layer with random
weights, in decode steps at the end of the context. Next to read: `rig.py`.
"""

from typing import Any

from quire.byte_sizes import format_bytes
from quire.cache_spec import CacheSpec, LatentKV, PagedKV
from quire.errors import ConfigError
from quire_lessons.compare.results import (
    FAKE_MODEL,
    Chart,
    Comparison,
    Progress,
    RunSettings,
    Series,
    TimedRequest,
    percentile,
)
from quire_lessons.compare.rig import Rig, Size

LLAMA_2_7B = (32, 32, 128)
"""Layers, query heads and head size of the default shape."""
RANK, ROTARY_SIZE = 512, 64
"""Latent vector and rotary part of DeepSeek-V3's MLA."""
DTYPE_BYTES = 2
CHUNK = 2048
"""Tokens of a step: queries, keys and values of 131,072 at once take 6 GiB."""
NUM_DECODES = 8


def compare(settings: RunSettings, progress: Progress) -> Comparison:
    """Size and time each kind. Raises: ConfigError, ModelError."""
    if settings.model == FAKE_MODEL:
        raise ConfigError("compare attention measures real kernels: model='fake' has none")
    settings.check_context("attention")
    num_layers, num_heads, head_size = LLAMA_2_7B if settings.model is None else _shape_of(settings.model)
    context, name = settings.context or 2048, settings.model or "the shape of Llama-2-7B"
    window = max(16, context // 4)
    groups = next(size for size in (4, 3, 2, 1) if num_heads % size == 0)
    kinds: dict[str, CacheSpec] = {
        "MHA": PagedKV(num_heads, head_size, DTYPE_BYTES),
        f"GQA ({num_heads // groups} KV heads)": PagedKV(num_heads // groups, head_size, DTYPE_BYTES),
        "MQA": PagedKV(1, head_size, DTYPE_BYTES),
        f"MHA, window {window}": PagedKV(num_heads, head_size, DTYPE_BYTES, window),
        f"MLA ({RANK} + {ROTARY_SIZE})": LatentKV(RANK, ROTARY_SIZE, DTYPE_BYTES),
    }
    rows: list[tuple[Any, ...]] = []
    sizes: dict[str, float] = {}
    for kind, spec in kinds.items():
        read = num_layers * spec.bytes_per_token * min(context, spec.window or context)
        sizes[kind] = num_layers * spec.bytes_per_token
        held = num_layers * spec.held_blocks(context, 16) * spec.block_bytes(16)
        progress(kind, len(rows), len(kinds))
        time_s = None
        if isinstance(spec, PagedKV):
            time_s = measure(settings, spec, num_heads, context, progress)
        total_s = None if time_s is None else num_layers * time_s
        rows.append((kind, sizes[kind], held, read, total_s, None if total_s is None else read / total_s / 1e9))
    columns = (
        ("attention", "text"),
        ("KV per token", "bytes"),
        (f"KV of {context}", "bytes"),
        ("a decode reads", "bytes"),
        (f"measured, 1 layer × {num_layers}", "seconds"),
        ("GB/s", "number"),
    )
    largest = max(sizes.values())
    explanation = tuple(
        f"{kind}: {_formula(spec, num_layers)} = {format_bytes(int(sizes[kind]))} per token"
        + ("" if sizes[kind] == largest else f", 1/{largest / sizes[kind]:.3g} of MHA")
        + (", and only the newest tokens are kept and read." if spec.window else ".")
        + (
            " Its kernel also multiplies by a projection, so that its time is not compared."
            if isinstance(spec, LatentKV)
            else ""
        )
        for kind, spec in kinds.items()
    )
    charts = (
        _bars("KV cache per token", "bytes", sizes),
        _bars("decode attention of one token, all layers", "seconds", {row[0]: row[4] for row in rows if row[4]}),
    )
    title = f"{name}: {num_layers} layers, {num_heads} query heads of {head_size}, 16-bit KV, {context} tokens"
    shown = {"model": settings.model, "seed": settings.seed, "context": context, "window": window}
    return Comparison("attention", title, shown, columns, tuple(rows), explanation, charts)


def measure(settings: RunSettings, spec: PagedKV, num_heads: int, context: int, progress: Progress) -> float | None:
    """Median seconds of one layer's attention in a decode step; None where steps are not timed by instruction."""
    config = {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "vocab_size": 256,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "sliding_window": spec.window,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    }

    def options(length: int) -> dict[str, int]:
        return {"max_model_len": length, "num_blocks_override": -(-length // 16) + 4}

    rig = Rig(
        settings,
        "random weights",
        lambda *_: None,
        config,
        Size("context", context, options),
        load_format="dummy",
        dtype="bfloat16",
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        block_size=16,
    )
    prompt = tuple(at % 256 for at in range(context - NUM_DECODES))
    run = rig.drive("attention", [TimedRequest(prompt, NUM_DECODES)], times_ops=True)
    decodes = run.steps[1 - NUM_DECODES :]
    times = [op.microseconds for step in decodes for op in step.ops if op.name.startswith("Attend:")]
    return percentile(times, 0.5) / 1e6 if times else None


def _shape_of(model: str) -> tuple[int, int, int]:
    from quire.models.registry import ModelRegistry
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.sources import resolve_source

    config = ModelRegistry.make_model_config(open_checkpoint(resolve_source(model), with_tensors=False).hf_config)
    return config.num_layers, config.num_heads, config.head_size


def _formula(spec: CacheSpec, num_layers: int) -> str:
    if isinstance(spec, PagedKV):
        return f"{num_layers} layers × 2 (K, V) × {spec.num_kv_heads} heads × {spec.head_size} × {DTYPE_BYTES} B"
    return f"{num_layers} layers × ({RANK} latent + {ROTARY_SIZE} rotary) × {DTYPE_BYTES} B"


def _bars(title: str, unit: str, values: dict[str, float]) -> Chart:
    series = tuple(Series(kind, ((0.0, value, float(row)),)) for row, (kind, value) in enumerate(values.items()))
    return Chart(title, unit, "", "bars", series)
