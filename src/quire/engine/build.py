"""From options to a running engine: source → checkpoint → model → hardware → decisions → executor → engine.

`load_parts` makes what an `LLMEngine` is made of. A second thread loads the tokenizer while native code packs the
weights.
Next to read: `resolve.py` for the decisions, `llm_engine.py` for what comes out.
"""

import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from quire.config import DTYPES, EngineConfig, EngineOptions, Hardware
from quire.engine.input_processor import make_vocabulary
from quire.engine.tokenizer_source import has_tokenizer, load_tokenizer, read_chat_template
from quire.errors import ConfigError
from quire.grammar.compiler import GrammarCompiler
from quire.logs import follow_environment
from quire.models.registry import ModelRegistry
from quire.parallel.executor import Executor
from quire.parallel.tensor_parallel import create_executor
from quire.resolve import resolve
from quire.runtime.hardware import detect_hardware
from quire.runtime.loader import weigh
from quire.runtime.tuning import tuned
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import Checkpoint, open_checkpoint, read_pooling
from quire.weights.model_files import Progress, ignore_progress
from quire.weights.sources import resolve_source

logger = logging.getLogger("quire.engine")
JUDGE = "qwen3-reranker"
"""Name of a model that answers "yes" or "no"; its files do not differ from those of Qwen3."""


class StartupTimes(dict[str, float]):
    """Phase → seconds, in order."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self[name] = time.perf_counter() - started


class EngineParts(NamedTuple):
    """Arguments of `LLMEngine`, by their names."""

    config: EngineConfig
    executor: Executor
    tokenizer: Tokenizer | None
    chat_template: str | None
    grammars: GrammarCompiler
    startup_times: dict[str, float]


def load_parts(
    options: EngineOptions,
    *,
    progress: Progress | None = None,
    hardware: Hardware | None = None,
    tokenizer: Tokenizer | None = None,
) -> EngineParts:
    """Load a model and whatever else an engine needs.

    `progress` is told of downloads; `hardware`: instead of what is found; `tokenizer`: of an engine with these options.

    A script logs as `QUIRE_LOGGING_LEVEL` says. Raises: ConfigError, ModelError, CapacityError.
    """
    if options.data_parallel_size > 1 and options.data_parallel_rank is None:
        raise ConfigError(
            f"data_parallel_size={options.data_parallel_size}: this is one engine, and `quire serve` starts "
            "several; data_parallel_size=1 works"
        )
    follow_environment()
    times = StartupTimes()
    started = time.perf_counter()
    chat_template = read_chat_template(options.chat_template)
    with times.phase("source"):
        files = resolve_source(options.model, revision=options.revision, progress=progress)
    with times.phase("checkpoint"):
        checkpoint = open_checkpoint(files, with_tensors=options.load_format != "dummy")
    with times.phase("decisions"):
        config = resolve_config(options, checkpoint, hardware)
    _log_decisions(config)
    with ThreadPoolExecutor(1, "quire-tokenizer") as pool:
        packs = threading.Event()
        loading = pool.submit(_timed_tokenizer, packs, tokenizer, options, checkpoint, config.model.vocab_size)

        def report(*news: Any) -> None:
            """Report progress, and let the tokenizer load from the first report on.

            Weights are packed from then on, without the interpreter's lock; before, both threads would wait for it.
            """
            packs.set()
            (progress or ignore_progress)(*news)

        if options.num_ranks > 1:
            packs.set()
        grammars = GrammarCompiler(lambda: make_vocabulary(config.model, loading.result()[0]))
        try:
            with times.phase("weights and cache"):
                executor = create_executor(config, checkpoint, report, grammars)
        finally:
            packs.set()
        found, times["tokenizer (beside)"] = loading.result()
    times["total"] = time.perf_counter() - started
    return EngineParts(config, executor, found, chat_template, grammars, times)


def resolve_config(options: EngineOptions, checkpoint: Checkpoint, hardware: Hardware | None = None) -> EngineConfig:
    """Decide how to run a checkpoint on this machine, or another, with what `quire tune` found.

    Raises: ConfigError, UnsupportedModelError, CapacityError.
    """
    model = ModelRegistry.make_model_config(
        checkpoint.hf_config, checkpoint.generation_config, options.hf_overrides, options.model_impl
    )
    model = weigh(model, checkpoint.tensors)
    if options.draft_model is not None or options.speculative == "mtp":
        from quire.engine.draft_source import with_draft  # it imports what heads are made of

        model = with_draft(model, options)
    if checkpoint.files.kind != "gguf":
        model = replace(model, embedding_defaults=read_pooling(checkpoint.files.path))
    if JUDGE in checkpoint.files.name.lower() and not model.labels and not model.label_tokens:
        model = replace(model, label_tokens=("no", "yes"))
    return resolve(options, hardware or tuned(detect_hardware(options.device), options, checkpoint), model)


def _log_decisions(config: EngineConfig) -> None:
    """Log each decision, and a warning for each option that has no effect."""
    for decision in config.decisions:
        logger.debug("%s = %s: %s", decision.name, decision.value, decision.reason)
    if config.hardware.tuned:
        logger.info("settings of `quire tune` are used: %s", config.hardware.tuned)
    if config.weights_on_disk:
        logger.info("weights are on disk: %s", next(item.reason for item in config.decisions if item.name == "weights"))
    model, quantization = config.model, config.options.quantization
    if quantization and model.stored_bytes and model.stored_bytes < model.num_parameters * DTYPES[config.dtype]:
        logger.warning(
            "quantization=%s has no effect on weights that are stored in 8 bit or less: leave it out", quantization
        )
    if config.device == "cpu" and config.options.gpu_memory_utilization != EngineOptions.gpu_memory_utilization:
        logger.warning(
            "gpu_memory_utilization=%s has no effect on a CPU: kv_cache_memory_bytes chooses the memory for KV",
            config.options.gpu_memory_utilization,
        )
    native = importlib.import_module("quire._native")
    if native.requested_isa_missing:
        logger.warning(
            "QUIRE_ISA=%s is unknown or not available here, %s is used: unset it, or see `quire doctor`",
            os.environ.get("QUIRE_ISA"),
            native.isa(),
        )
    if native.unbuilt_isa:
        logger.warning(
            "Quire was built without the kernels for %s, which this processor has; %s is used: build it again here "
            "with `make run` or `pip install -e .`",
            native.unbuilt_isa,
            native.isa(),
        )
    elif native.isa() == "scalar" and not os.environ.get("QUIRE_ISA"):
        logger.warning(
            "the portable kernels are used, many times slower than those for AVX2 (x86-64) or dot products (Armv8.2): "
            "`quire doctor` says why; choose a small model, or a newer processor"
        )


def _timed_tokenizer(
    packs: threading.Event,
    known: Tokenizer | None,
    options: EngineOptions,
    checkpoint: Checkpoint,
    model_vocab_size: int,
) -> tuple[Tokenizer | None, float]:
    """Return the tokenizer and the seconds of loading; a shape with random weights may have none."""
    packs.wait()
    started = time.perf_counter()
    tokenizer = known
    if tokenizer is None and (options.load_format != "dummy" or options.tokenizer or has_tokenizer(checkpoint)):
        tokenizer = load_tokenizer(checkpoint, options.tokenizer, model_vocab_size)
    return tokenizer, time.perf_counter() - started
