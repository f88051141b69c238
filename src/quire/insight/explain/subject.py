"""The subject of an explanation: `Settings`, the question that it answers; `open_subject`, the name of a model to its
configuration, with the headers of its weights where there are some; `RankModel`, a rank's share of the model.

A `config.json` alone is enough: its path, a directory that holds only that, a hub id, or a built-in preset.
Next to read: `explanation.py`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from quire.cache_spec import CacheSpec, PagedKV
from quire.config import DTYPES, EngineConfig, EngineOptions, ModelConfig
from quire.errors import ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError, nearest
from quire.files import read_json_object
from quire.kernels.collective import RecordingGroup
from quire.kernels.instruction import Instruction, Packing
from quire.kernels.tracing import NotTraceableError
from quire.layers.group import SINGLE, Group, LocalGroup, Partition, share_heads
from quire.lazy_torch import on_meta
from quire.runtime.loader import make_share
from quire.runtime.plan.emit import place_buffers
from quire.runtime.plan.load import trace_share
from quire.runtime.plan.lower import split_name
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.hub import fetch_from_hub, parse_hub_id
from quire.weights.model_files import Progress
from quire.weights.sources import ModelFiles, resolve_source

# --- A model --------------------------------------------------------------------------------------

PRESETS: Mapping[str, Mapping[str, Any]] = json.loads((Path(__file__).parent / "presets.json").read_text())
"""Configurations by name, as the models' authors publish them."""
STORED = "quantization_config"
"""Field that says how the published weights are stored: metadata of a checkpoint without any."""
WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def open_subject(name: str, progress: Progress | None = None) -> Checkpoint:
    """Return the checkpoint of a model; without weights its `tensors` are empty.

    A hub id that is not cached costs its config.json only. Raises: ModelError.
    """
    path = Path(name).expanduser()
    presets = {known.lower(): known for known in PRESETS}
    if has_config_alone(name):
        if not path.exists():
            return _of_config(name, PRESETS[presets[name.lower()]], "preset", path)
        return _of_config(name, read_json_object(path / "config.json" if path.is_dir() else path), "local", path)
    hub = None if path.exists() else parse_hub_id(name)
    if hub is not None and hub.file is None and hub.quantization is None:
        try:
            files = resolve_source(name, offline=True)
        except ModelError:
            snapshot = fetch_from_hub(replace(hub, file="config.json"))
            origin = f"hub:{hub.repository}@{snapshot.name}"
            return _of_config(name, read_json_object(snapshot / "config.json"), origin, snapshot)
        return open_checkpoint(files)
    try:
        return open_checkpoint(resolve_source(name, progress=progress))
    except ModelNotFoundError as error:
        close = nearest(name.lower(), presets)
        raise ModelNotFoundError(f"{error}; or a preset of explain: {', '.join(PRESETS)}{close}") from None


def has_config_alone(name: str) -> bool:
    """Return whether a name is that of a preset, of a `config.json`, or of a directory that has no weights."""
    path = Path(name).expanduser()
    if not path.exists():
        return name.lower() in {known.lower() for known in PRESETS}
    if path.is_dir():
        has_weights = any(item.suffix in WEIGHT_SUFFIXES for item in path.iterdir())
        return (path / "config.json").is_file() and not has_weights
    return path.suffix == ".json"


def _of_config(name: str, config: Mapping[str, Any], origin: str, path: Path) -> Checkpoint:
    # How a checkpoint is stored does not matter where none is read.
    fields = dict(config)
    stored = fields.pop(STORED, None)
    return Checkpoint(ModelFiles(name, path, "hf", origin), fields, metadata={STORED: stored} if stored else {})


# --- Settings, and variants: choices of the options that decide memory ----------------------------

DEFAULT_UTILIZATION = EngineOptions.gpu_memory_utilization
MAX_VARIANTS = 64
MAX_CHUNKS = 1024
"""Rows of the table of a prompt's chunks; each takes 8 ms."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Values of the options that decide how many requests fit in memory."""

    gpu_memory_utilization: float
    kv_dtype: str
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Settings:
    """The question. Of an option with several values the first one is explained, and all of them are compared.

    Fields:
        tp: ranks that share each layer. batches: streams of a decode. ctx: tokens of a prompt and of a context.
        chunk: tokens of a prefill's chunks; None: prompts are computed whole.
        lora: adapters, each as a rank or NAME=PATH.
        max_num_seqs: () takes the largest batch. max_model_len: () takes `ctx`.
    """

    tp: int = 1
    batches: tuple[int, ...] = (1, 8, 32)
    ctx: int = 512
    chunk: int | None = None
    dtype: str = "auto"
    kv_dtype: tuple[str, ...] = ("auto",)
    quantization: str | None = None
    device: str = "auto"
    gpu_memory_utilization: tuple[float, ...] = (DEFAULT_UTILIZATION,)
    max_num_seqs: tuple[int, ...] = ()
    max_model_len: tuple[int, ...] = ()
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    lora: tuple[str, ...] = ()

    def variants(self) -> list[Variant]:
        """Return every combination of the values, the explained one first. Raises: ConfigError above MAX_VARIANTS."""
        axes = (
            self.gpu_memory_utilization,
            self.kv_dtype,
            self.max_num_seqs or (max(self.batches),),
            self.max_model_len or (self.ctx,),
        )
        found = [Variant(*values) for values in product(*axes)]
        if len(found) > MAX_VARIANTS:
            raise ConfigError(
                f"{len(found)} combinations of settings are too many for one table: at most {MAX_VARIANTS} fit"
            )
        return found

    @property
    def longest(self) -> int:
        """The longest context that is asked for."""
        return max(self.ctx, *self.max_model_len, 0)


def remedies(asked: Variant, *, is_cpu: bool) -> Iterator[Variant]:
    """Yield variants that need less memory for each request, or leave more of it to other programs."""
    is_narrow = asked.kv_dtype.startswith(("int8", "fp8"))
    if not is_cpu:
        less = replace(asked, gpu_memory_utilization=round(asked.gpu_memory_utilization / 3, 3))
        yield less
        yield from () if is_narrow else (replace(less, kv_dtype="int8"),)
    if not is_narrow:
        yield replace(asked, kv_dtype="int8")
    if asked.max_num_seqs >= 4:
        yield replace(asked, max_num_seqs=asked.max_num_seqs // 4)
    if asked.max_model_len >= 2:
        yield replace(asked, max_model_len=asked.max_model_len // 2)


def price(asked: Variant, variant: Variant) -> str:
    """Name what a variant costs beside the first one."""
    costs = (
        (variant.gpu_memory_utilization != asked.gpu_memory_utilization, "another share for other programs"),
        (
            variant.kv_dtype != asked.kv_dtype,
            "KV is rounded to 8 bit" if variant.kv_dtype.startswith(("int8", "fp8")) else "other KV type",
        ),
        (variant.max_num_seqs != asked.max_num_seqs, f"more than {variant.max_num_seqs} requests wait"),
        (variant.max_model_len != asked.max_model_len, f"above {variant.max_model_len} tokens: refused"),
    )
    return "; ".join(text for differs, text in costs if differs) or "as asked"


# --- A rank. The `cost` of its plan's instructions is the only source of FLOPs and bytes ----------


@dataclass(frozen=True, slots=True)
class RankWeight:
    """A parameter: its whole shape, the share of this rank, and the share's bytes in memory."""

    name: str
    whole_shape: tuple[int, ...]
    shape: tuple[int, ...]
    format: str
    num_bytes: int

    @property
    def num_values(self) -> int:
        """Values of the whole parameter."""
        return math.prod(self.whole_shape)

    @property
    def layer_and_role(self) -> tuple[int | None, str]:
        """ "layers.3.mlp.down_proj.weight" → 3, "mlp.down_proj.weight"."""
        return split_name(self.name)


@dataclass(frozen=True, slots=True)
class RankModel:
    """Parameters, instructions and cache of one rank.

    Fields:
        names: of the parameters, by identity: an instruction's weight is one.
        body, head: instructions; the rows of the head are those that need logits.
        cache_specs: per layer, of this rank's heads.
        buffer_row_bytes: bytes of the plan's buffers per token of a step.
    """

    weights: tuple[RankWeight, ...]
    names: dict[int, str]
    body: Sequence[Instruction]
    head: Sequence[Instruction]
    cache_specs: tuple[CacheSpec, ...]
    buffer_row_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters of this rank."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def num_parameters(self) -> int:
        """Parameters of this rank."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    def role_of(self, parameter: object) -> str:
        """Return the role of an instruction's weight in its layer, as in "mlp.down_proj"."""
        return split_name(self.names[id(parameter)])[1].removesuffix(".weight")

    def share_of(self, model: ModelConfig, *, is_stored: bool, tp: int) -> ModelConfig:
        """Return the model's facts as the memory plan of one rank needs them."""
        if tp == 1:
            return model
        names = [
            name
            for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner")
            if model.hf_config.get(name)
        ]
        shares = {name: model.hf_config[name] // tp for name in names}
        return replace(
            model,
            num_parameters=self.num_parameters,
            cache_specs=self.cache_specs,
            num_heads=model.num_heads // tp,
            num_kv_heads=max(1, model.num_kv_heads // tp),
            hf_config={**model.hf_config, **shares},
            stored_bytes=self.weight_bytes if is_stored else None,
        )


def trace_rank(config: EngineConfig, checkpoint: Checkpoint, tp: int) -> RankModel:
    """Trace rank 0 of `tp` ranks. `config`: resolved for the whole model.

    Raises: ConfigError if `tp` does not divide the model; UnsupportedModelError for a model that cannot be traced.
    """
    model_config = config.model
    ring_bytes = None if config.uses_plan else DTYPES[config.dtype]
    group: Group = SINGLE if tp == 1 else RecordingGroup(0, tp, model_config.vocab_size, ring_bytes)
    with on_meta():
        share = make_share(config, checkpoint, group)
    try:
        program, packed = trace_share(config, share, config.scheduler.layer_groups)
    except NotTraceableError as error:
        raise UnsupportedModelError(
            f"{model_config.architecture} cannot be explained: its code cannot be traced, because of {error}"
        ) from error
    weights = tuple(
        weigh(
            name, share.partitions.get(name, Partition()).whole_shape(shape), shape, packed.packings.get(name), config
        )
        for name, shape in packed.shapes.items()
    )
    names = {id(parameter): name for name, parameter in share.parameters.items()}
    specs = tuple(_rank_spec(spec, model_config, group) for spec in model_config.cache_specs)
    buffers = place_buffers(program.body, program.hidden)
    return RankModel(weights, names, program.body, program.head, specs, sum(buffers.row_bytes))


def weigh(
    name: str, whole: tuple[int, ...], shape: tuple[int, ...], found: Packing | None, config: EngineConfig
) -> RankWeight:
    """Return a parameter with its bytes: packed for a plan, which keeps vectors in fp32; else in the compute dtype."""
    if found is not None and config.uses_plan:
        return RankWeight(name, whole, shape, found.name, found.num_bytes(shape[1]))
    value_bytes = 4 if config.uses_plan else DTYPES[config.dtype]
    stored = "f32" if config.uses_plan else config.dtype
    return RankWeight(name, whole, shape, stored, value_bytes * math.prod(shape))


def _rank_spec(spec: CacheSpec, model: ModelConfig, group: Group) -> CacheSpec:
    if not isinstance(spec, PagedKV):
        return spec
    _, kv_heads = share_heads(model.num_heads, spec.num_kv_heads, group)
    return msgspec.structs.replace(spec, num_kv_heads=kv_heads.size)


def rank_partitions(config: EngineConfig, checkpoint: Checkpoint, tp: int) -> list[Mapping[str, Partition]]:
    """Return per rank of `tp` ranks the rows and columns that it holds of each parameter that is cut."""
    with on_meta():
        return [make_share(config, checkpoint, LocalGroup(rank, tp)).partitions for rank in range(tp)]
