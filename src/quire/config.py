"""Configuration: the user's choices (`EngineOptions`), and the engine that runs (`EngineConfig`) with reasons.

`resolve` is pure: the same options, hardware and model give the same config, and nothing writes to a config
afterwards. Command-line flags, their help, the docs table and Python keyword arguments are all made from the
fields of `EngineOptions`, so they cannot disagree. No tensors, no torch.
Next to read: `types.py`, then `engine/llm_engine.py`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from quire.adapter import adapter_options
from quire.cache_spec import CacheGroup, CacheSpec
from quire.errors import ConfigError, nearest
from quire.option_fields import check_options, option

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Compute dtypes and their size in bytes."""
NARROW_KV_DTYPES = {"int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Types of the KV cache that only a plan has, and the size of a value in bytes."""
KV_DTYPES = {**DTYPES, **NARROW_KV_DTYPES}
"""Types of the KV cache and the size of a value in bytes."""
TILE_ROWS = 12
"""Tokens of a step from which on AMX's bf16 tiles beat int8 vectors (benchmarks/kernels/gemm_quantised.py)."""
KV_SCALE_BYTES = {**dict.fromkeys(KV_DTYPES, 0), "int8": 4}
"""Bytes beside the values of one token's key or value in one head: an fp32 scale."""
DTYPE_ALIASES = {"float": "float32", "half": "float16", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
POLICIES = ("fcfs", "priority", "sjf", "fair")
PREEMPTION_MODES = ("auto", "swap", "recompute")
PERFORMANCE_MODES = ("throughput", "interactivity")
DEFAULT_MAX_NUM_SEQS = 256
MAX_NUM_EVENTS = 2**31 - 1
MAX_NUM_SEQS = 65_536
"""Every sequence has a row in the worker's arrays."""
STEP_S = 0.025
"""Longest time of a step with several decode iterations, or with prompts beside decodes, as far as it can be foreseen:
outputs come at least 40 times a second."""
DEFAULT_MAX_MODEL_LEN_CAP = 8192
"""Contexts longer than this are used only when asked for: their KV cache rarely fits."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Everything a user may choose, under vLLM's names. Unset values are chosen by `resolve`.

    Units: lengths in tokens unless the name says bytes.
    """

    model: str = option("smollm2", "alias, local GGUF file or HF directory, or HF hub id", group="model")
    tokenizer: str | None = option(None, "tokenizer file or directory, if not the model's", group="model")
    revision: str | None = option(None, "hub revision: branch, tag or commit", group="model")
    hf_overrides: Mapping[str, Any] | None = option(None, "values that replace fields of config.json", group="model")
    chat_template: str | None = option(
        None, "chat template: a file, the text itself, or the name of one of the model's", group="model"
    )
    trust_remote_code: bool = option(False, "for compatibility: code in model directories is never run", group="model")
    load_format: str = option(
        "auto", "weights: auto, or dummy for random ones", choices=("auto", "dummy"), group="model"
    )
    model_impl: str = option(
        "auto",
        "code of the model: Quire's own, or Transformers' module, which auto takes where Quire has none",
        choices=("auto", "quire", "transformers"),
        group="model",
    )
    weight_cache: str = option(
        "auto",
        "packed weights on disk, which later starts and other processes map: auto, off or a directory",
        group="model",
    )
    weight_cache_bytes: int | None = option(None, "most bytes in that directory", group="model")
    dtype: str = option("auto", "compute type: auto, float32, bfloat16, float16", group="model")
    quantization: str | None = option(
        None,
        "quantise the weights of an unquantised model at load; fp8: FP8's values, held and computed as int8",
        choices=("int8", "int4", "fp8"),
        group="model",
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N", group="model")
    seed: int = option(0, "seeds requests that bring none", group="model", low=-math.inf)
    max_model_len: int | None = option(None, "context length: prompt and generated tokens")
    max_num_seqs: int = option(DEFAULT_MAX_NUM_SEQS, "sequences running at once", high=MAX_NUM_SEQS)
    max_num_batched_tokens: int = option(2048, "token budget of one step")
    block_size: int | None = option(None, "tokens per KV block")
    kv_cache_dtype: str = option(
        "auto",
        "KV cache type; auto is the compute type, fp8 is fp8_e4m3",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory used in all", low=0.001, high=1)
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory for the KV cache of a rank; unset, on CPUs: 256 tokens per sequence or 4 full contexts, at most 4 GiB",
    )
    num_blocks_override: int | None = option(None, "number of KV blocks, instead of from memory")
    enable_prefix_caching: bool = option(True, "share KV blocks of equal prefixes")
    kv_disk: str | None = option(
        None, "directory that keeps KV blocks of prefixes which leave the memory; they are found after a restart"
    )
    kv_disk_bytes: int | None = option(None, "most bytes in that directory")
    preemption_mode: str = option(
        "auto",
        "preempted requests: swap copies their KV blocks to host memory, recompute computes them again",
        choices=PREEMPTION_MODES,
    )
    swap_space: float | None = option(None, "host memory for blocks of preempted requests, in GiB; 0: none", low=0)
    enable_chunked_prefill: bool = option(True, "split prompts over several steps")
    max_num_partial_prefills: int = option(1, "prompts that may be partly prefilled at once")
    max_long_partial_prefills: int = option(1, "of these, prompts above long_prefill_token_threshold")
    long_prefill_token_threshold: int = option(
        0, "prompts above this length get at most this many tokens a step; 0: off", low=0
    )
    performance_mode: str = option(
        "throughput",
        "interactivity, on CPUs: short prefill chunks while other requests decode",
        choices=PERFORMANCE_MODES,
    )
    multi_step_decode: int = option(
        8, "most tokens to decode per request in one engine step; 1 when a request waits or uses stop strings"
    )
    speculative: str = option(
        "auto",
        "drafts of the next tokens, verified in one step: suffix takes them from the request's text and from"
        " finished answers; draft and eagle from draft_model, mtp from the model's layer for it, too; auto is what"
        " draft_model says, else suffix where it never changes an answer; off",
        choices=("auto", "suffix", "draft", "mtp", "eagle", "off"),
    )
    draft_model: str | None = option(
        None, "small model of the same vocabulary, or EAGLE-3 head, that guesses tokens for the model"
    )
    batch_invariant: bool = option(
        False, "a request gets the same bits however it is batched, also where another arithmetic is faster (AMX)"
    )
    scheduling_policy: str = option(
        "fcfs", "order of the waiting queue; fair: equal tokens for each API key or client_id", choices=POLICIES
    )
    sjf_ageing_tokens_per_s: float = option(
        100.0, "sjf: tokens by which a waiting prompt counts as shorter, per second", low=0
    )
    max_num_waiting: int | None = option(None, "length of the waiting queue; unset: unbounded")
    max_logprobs: int = option(20, "largest logprobs a request may ask for; -1: the whole vocabulary", low=-1)
    distributed_executor_backend: str = option(
        "mp", "where stages run: mp, processes of this machine; ray, actors of a Ray cluster", choices=("mp", "ray")
    )
    tensor_parallel_size: int = option(1, "processes that share each layer, each with its cores or a GPU of its own")
    pipeline_parallel_size: int = option(
        1, "stages of layers, each in processes of its own, that compute steps in turn"
    )
    data_parallel_size: int = option(1, "engines of one server, each with its share of cores and memory")
    data_parallel_rank: int | None = option(None, "number of this engine, from 0: `quire serve` sets it", low=0)
    lora: Sequence[str] = option(
        (), "LoRA adapter as NAME=PATH, of PEFT (a directory) or GGUF; a request names it as its model"
    )
    enable_lora: bool = option(False, "let adapters be loaded while the engine runs")
    max_loaded_loras: int = option(1024, "most names of adapters that clients may load; beside those of lora")
    lora_bytes: int = option(1 << 30, "most bytes of adapters in memory; others are read again when asked for")
    gpu_kernels: str = option(
        "auto",
        "kernels of a GPU: triton, which auto is where the card can, or reference, PyTorch's functions, for tests",
        choices=("auto", "triton", "reference"),
    )
    enforce_eager: bool = option(False, "run the model op by op in PyTorch, not as a plan", group="debug")
    max_num_events: int = option(65536, "length of the event log's ring buffer", group="debug", high=MAX_NUM_EVENTS)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora", adapter_options(self.lora))
        check_options(self)
        if not all(isinstance(key, str) for key in self.hf_overrides or ()):
            raise ConfigError(f"hf_overrides={self.hf_overrides!r} must have the names of config.json's fields as keys")
        if self.dtype != "auto" and canonical_dtype(self.dtype) is None:
            raise ConfigError(
                f"dtype={self.dtype!r} is not one of auto, {', '.join(DTYPES)}{nearest(str(self.dtype), DTYPES)}"
            )

    @property
    def has_adapters(self) -> bool:
        """True if requests may choose adapters."""
        return bool(self.lora) or self.enable_lora

    @property
    def num_ranks(self) -> int:
        """Processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def describe_ranks(self) -> str:
        """Return both parallel sizes above 1, as in "TP 2, PP 2"."""
        sizes = (("TP", self.tensor_parallel_size), ("PP", self.pipeline_parallel_size))
        return ", ".join(f"{name} {size}" for name, size in sizes if size > 1)

    @classmethod
    def from_kwargs(cls, model: str | os.PathLike[str] | None = None, **kwargs: Any) -> "EngineOptions":
        """Build from keyword arguments. Raises ConfigError on an unknown name, with the nearest known one."""
        known = [item.name for item in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise ConfigError(f"unknown option '{name}'{nearest(name, known)}")
        if model is not None:
            kwargs["model"] = model
        # Programs pass paths; the code below expects text.
        return cls(
            **{name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in kwargs.items()}
        )


def canonical_kv_dtype(options: EngineOptions) -> str:
    """Return the type that `kv_cache_dtype` names: vLLM's "fp8" is e4m3."""
    return "fp8_e4m3" if options.kv_cache_dtype == "fp8" else options.kv_cache_dtype


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine, as found by `runtime/hardware.py`."""

    device: str
    """"cpu" or "cuda:N"."""
    total_memory_bytes: int
    available_memory_bytes: int
    has_fast_bfloat16: bool
    """True if bf16 matrix products are at least as fast as fp32 ones."""
    num_threads: int
    name: str = ""
    memory_limit: str = ""
    """Limit below the memory of the machine, for messages: "cgroup", "RLIMIT_AS, ulimit -v"."""
    has_tiles: bool = False
    """True if the kernels in use multiply bf16 in AMX's tile registers."""
    tile_rows: int = TILE_ROWS
    """Tokens of a step from which on tiles are the faster."""
    kv_ahead_bytes: int | None = None
    """KV that products fetch in each thread for the next attention; None: as the size of the last cache says."""
    num_devices: int = 1
    """GPUs from `device` on, for ranks."""
    has_triton: bool = False
    """True if Triton, which compiles the kernels of a GPU, is installed."""
    tuned: str = ""
    """The findings of `quire tune`, if some of these settings come from it."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Facts about a model that the engine needs; the mathematics is in the model's own `Config`.

    Made by `models/registry.py` from `hf_config`.
    """

    architecture: str
    hf_config: Mapping[str, Any]
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context_len: int
    num_parameters: int
    cache_specs: tuple[CacheSpec, ...]
    """Kind of cache of each layer, with `dtype_bytes` 1; `resolve` fills in the real one."""
    stored_bytes: int | None = None
    """Size of the weights where quantised ones stay so; None if there is no file."""
    expert_share: float = 0.0
    """Share of the weights in experts of which a token chooses some."""
    chosen_share: float = 1.0
    """Share of a layer's experts that a token chooses."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Recommendations of generation_config.json, under the names of `SamplingParams`."""
    labels: tuple[str, ...] = ()
    """Labels of the classification head; empty for a model that generates text."""
    label_tokens: tuple[str, ...] = ()
    """Of a model that judges pairs by its next token: the words for no and yes; else empty."""
    embedding_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Pooling that the files of sentence-transformers name, under the names of `PoolingParams`."""
    implementation: str = "quire"
    """"quire", or "transformers" for Transformers' own module."""
    draft: "DraftModel | None" = None  # guesses tokens for this model


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that guesses tokens for another. Its layers' caches are further layers of the same blocks."""

    model: ModelConfig
    path: str
    file_kind: str
    kind: str = "draft"  # "mtp": the model's own layer, "eagle": a head; these are loaded with the model


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of `Scheduler` and `BlockManager`. All lengths in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    """All blocks, the null block included."""
    kv_cache_groups: tuple[CacheGroup, ...]
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    prefill_tokens_per_decode: int | None = None
    """Tokens that prompts get at least, per decoding request of a step, or as many as fill 12; None: no limit."""
    multi_step_decode: int = 1
    """Most tokens to decode per request in one step; 1 when a request waits or uses stop strings."""
    max_in_flight: int = 1
    """Steps that may be scheduled before the result of the oldest one is known."""
    pipeline_stages: int = 1
    """Stages that compute steps in turn: a step gets its share of the decodes, with known tokens only."""
    policy: str = "fcfs"
    sjf_ageing_tokens_per_s: float = 100.0
    max_num_waiting: int | None = None
    num_host_blocks: int = 0
    """Blocks of host memory for preempted requests; 0: they recompute."""
    compares_swap: bool = False
    """True: blocks are copied to the host and back only if that is measured to be faster than computing them."""
    max_disk_bytes: int = 0
    """Limit of the directory for evicted blocks; 0: there is none."""

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """Per layer the index of its KV cache group."""
        found = {layer: index for index, group in enumerate(self.kv_cache_groups) for layer in group.layer_indices}
        return tuple(found[layer] for layer in sorted(found))

    def of_layers(self, layers: range) -> "SchedulerConfig":
        """Return the same blocks, with these layers only."""
        groups = (
            replace(group, layer_indices=tuple(layer for layer in group.layer_indices if layer in layers))
            for group in self.kv_cache_groups
        )
        return replace(self, kv_cache_groups=tuple(groups))


@dataclass(frozen=True, slots=True)
class Decision:
    """A value that `resolve` chose, and the reason."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine that runs. Printed with its decisions at start, never written again."""

    options: EngineOptions
    model: ModelConfig
    hardware: Hardware
    device: str
    dtype: str
    kv_dtype: str
    scheduler: SchedulerConfig
    decisions: tuple[Decision, ...]
    uses_plan: bool = False
    """True: the model runs as a native plan; False: as a device plan, or op by op in PyTorch."""
    keeps_stored_weights: bool = False
    """True: a plan computes with quantised weights as they are stored; False: they become the compute dtype."""
    weights_on_disk: bool = False
    """True: the weights are larger than memory, and a mapped file holds the experts until tokens choose them."""
    speculative: str = "off"
    """Source of drafts: "suffix", "draft", "mtp", "eagle", "off"."""
    batch_invariant: bool = True
    """True: one arithmetic for any number of rows; False: AMX's bf16 tiles where a step has at least `tile_rows`."""
    gpu_kernels: str = "off"
    """Kernels of a device plan: "triton" or "reference"; "off": there is no such plan."""

    @property
    def tile_rows(self) -> int:
        """Rows from which on steps are computed in bf16 tiles; 0: never."""
        return 0 if self.batch_invariant else self.hardware.tile_rows

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages: processes."""
        return self.options.num_ranks

    @property
    def resident_share(self) -> float:
        """Share of the weights that must be in memory: all, or those that a token reads."""
        return read_share(self.model) if self.weights_on_disk else 1.0

    def on_rank(self, rank: int) -> "EngineConfig":
        """Return the same on the device of a rank: each has a GPU of its own, from the engine's on."""
        kind, _, first = self.device.partition(":")
        return self if kind == "cpu" else replace(self, device=f"{kind}:{int(first) + rank}")

    @property
    def threads_per_rank(self) -> int:
        """Threads that compute in each rank."""
        has_nodes = self.options.distributed_executor_backend == "ray"  # each stage has a node of its own
        num_sharing = self.options.tensor_parallel_size if has_nodes else self.num_ranks
        return max(1, self.hardware.num_threads // num_sharing)

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in memory, of all ranks together, without a draft model's."""
        return weight_bytes(
            self.model, self.dtype, quantization=self.options.quantization, keeps_stored=self.keeps_stored_weights
        )


def read_share(model: ModelConfig) -> float:
    """Return the share of the weights that a token reads: all but the experts that it does not choose."""
    return 1 - model.expert_share * (1 - model.chosen_share)


QUANTIZED_BITS = {"int8": 8.5, "int4": 5.0, "fp8": 8.5}
"""Bits per weight, scales included, of what load-time quantisation makes."""


def weight_bytes(model: ModelConfig, dtype: str, *, quantization: str | None, keeps_stored: bool) -> int:
    """Size of the weights in memory: as stored, if that is smaller and kept, else in the compute dtype."""
    plain = model.num_parameters * DTYPES[dtype]
    if not keeps_stored:
        return plain
    if model.stored_bytes is not None and model.stored_bytes < plain:
        return model.stored_bytes
    return int(model.num_parameters * QUANTIZED_BITS[quantization] / 8) if quantization else plain


def canonical_dtype(name: str) -> str | None:
    """The full name of a compute dtype, or None if there is no such."""
    full = DTYPE_ALIASES.get(name, name)
    return full if full in DTYPES else None
