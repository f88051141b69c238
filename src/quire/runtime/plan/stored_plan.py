"""Plans and model descriptions kept in the cache directory: a second start on a CPU imports neither torch nor a model.

`plans/plan-….json` has a traced model's native ops and the place of each stored tensor, `plans/model-….json` the
`ModelConfig`. Two lines each: the key and a checksum, then the value. The key is a SHA-256 of everything that the value
depends on: the model's configuration and its tensors' shapes and formats, the options that change a program, the
instruction set, torch's version and Quire's own source. A file that is missing, damaged or of another key is made anew.
Next to read: `emit.py`, which runs the ops; `load.py`, which traces.
"""

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from quire import __version__, _native
from quire._native import WeightFormat
from quire.config import EngineConfig, EngineOptions, ModelConfig
from quire.kernels.instruction import Packing
from quire.models.registry import ModelRegistry, has_model_file
from quire.runtime.links import ONE_RANK, Links
from quire.runtime.placement import Placement
from quire.runtime.plan.emit import NativeOps
from quire.runtime.plan.packed_weights import PackedWeights
from quire.runtime.plan.weight_file import fill_weights
from quire.weights.checkpoint import Checkpoint
from quire.weights.model_cache import cache_directory
from quire.weights.progress import Progress
from quire.weights.weight_tensor import WeightTensor

if TYPE_CHECKING:
    from quire.layers.group import Group
    from quire.runtime.plan.record import Recording

Loaded = tuple[NativeOps, PackedWeights, "Callable[[], Recording]"]
T = TypeVar("T")

logger = logging.getLogger("quire.runtime")
MAX_FILES = 128
"""When a file is added, those used longest ago are deleted."""
SOURCES = ("models", "layers", "kernels", "runtime")
"""Folders whose code decides what a program is."""
INDIFFERENT = frozenset((
    "model", "model_impl", "tokenizer", "revision", "hf_overrides", "chat_template", "trust_remote_code", "load_format",
    "device", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "num_blocks_override", "enable_prefix_caching", "enable_chunked_prefill",
    "max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold", "performance_mode",
    "multi_step_decode", "batch_invariant", "data_parallel_size", "data_parallel_rank",
    "scheduling_policy", "sjf_ageing_tokens_per_s", "max_num_waiting", "max_logprobs", "max_num_events",
    "kv_disk", "kv_disk_bytes", "preemption_mode", "swap_space", "weight_cache", "weight_cache_bytes",
))  # fmt: skip
"""Options that change no program, or are in the key as what they led to. All others are part of the key."""


class Header(msgspec.Struct, frozen=True):
    """First line of a file."""

    key: str
    sha256: str
    made_by: str


class StoredPlacement(msgspec.Struct, frozen=True, array_like=True):
    """A `Placement` without its values: which rows of a checkpoint's tensor, and how they are read.

    Fields:
        stored_rows: the first of the tensor's stored rows, and their number: of a stack they are one part; None if all
            are read as one (`WeightTensor.taps_first`).
        has_own_order: rows are in `row_order`, int64, or None for as stored; else in the order of the checkpoint's.
        rows, columns: see `Placement`.
    """

    parameter_name: str
    first_row: int
    name: str
    shape: tuple[int, ...]
    stored_rows: tuple[int, int] | None
    is_transposed: bool
    offset: float
    has_own_order: bool
    row_order: bytes | None
    rows: tuple[int, int] | None
    columns: tuple[int, int] | None


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """The shape of a packed parameter, and of a matrix each part's number of outputs and format."""

    shape: tuple[int, ...]
    parts: list[tuple[int, str]]


class StoredPlan(msgspec.Struct, frozen=True):
    """A plan without weights."""

    ops: NativeOps
    parameters: dict[str, Parameter]
    placements: list[StoredPlacement]


def load_plan(
    config: EngineConfig,
    checkpoint: Checkpoint,
    layer_groups: tuple[int, ...],
    progress: Progress | None,
    group: "Group",
    links: Links = ONE_RANK,
) -> Loaded:
    """Return the ops of this rank's share of the model, its packed weights, and a function that gives the instructions.

    Raises: as `plan_model`.
    """
    key = plan_key(config, checkpoint, layer_groups, links.rank)
    stored = None if key is None else read("plan", key, StoredPlan)

    def recording() -> "Recording":
        from quire.runtime.plan.load import trace_program
        from quire.runtime.plan.record import record

        program, weights, _ = trace_program(config, checkpoint, layer_groups, group, links.stage)
        return record(program, weights)

    if stored is not None:
        packings = {
            name: Packing(tuple((count, WeightFormat[part_format]) for count, part_format in item.parts))
            for name, item in stored.parameters.items()
        }
        weights = PackedWeights(stored.parameters, packings, config.threads_per_rank)
        weights.placements = [_restored(item, checkpoint.tensors) for item in stored.placements]
        fill_weights(config, checkpoint, weights, progress, links.rank)
        return stored.ops, weights, recording
    from quire.runtime.plan.load import plan_model
    from quire.runtime.plan.record import record

    program, weights = plan_model(config, checkpoint, layer_groups, progress, group, links.stage, links.rank)
    recorded = record(program, weights, links.exchange)
    _keep(key, config, checkpoint, recorded.ops, weights)
    return recorded.ops, weights, lambda: recorded


def store_plan(
    config: EngineConfig, checkpoint: Checkpoint, layer_groups: tuple[int, ...], group: "Group", links: Links
) -> None:
    """Trace a rank's share of the model and keep its plan, without its weights. Raises: as `trace_program`."""
    from quire.runtime.plan.load import trace_program
    from quire.runtime.plan.record import record

    program, weights, _ = trace_program(config, checkpoint, layer_groups, group, links.stage)
    key = plan_key(config, checkpoint, layer_groups, links.rank)
    _keep(key, config, checkpoint, record(program, weights, links.exchange).ops, weights)


def _keep(
    key: str | None, config: EngineConfig, checkpoint: Checkpoint, ops: NativeOps, weights: PackedWeights
) -> None:
    """Write a plan, if it has a key, the model's code is Quire's own and its weights are rows of the checkpoint."""
    if key is None or not is_built_in(config.model.hf_config):
        return
    described = [_described(item, checkpoint.tensors) for item in weights.placements]
    if all(described):
        packings = weights.packings
        parameters = {
            name: Parameter(shape, [(count, part_format.name) for count, part_format in packings[name].parts]
                            if name in packings else [])
            for name, shape in weights.shapes.items()
        }  # fmt: skip
        write("plan", key, StoredPlan(ops, parameters, described))  # type: ignore[arg-type]  # no None


class ConfigSource(msgspec.Struct, tag="describe", array_like=True):
    """The configuration files of a model, and the options that change its `ModelConfig`."""

    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    overrides: dict[str, Any] | None
    model_impl: str = "auto"

    @classmethod
    def of(cls, options: EngineOptions, checkpoint: Checkpoint) -> "ConfigSource":
        """Return those of a checkpoint."""
        overrides = None if options.hf_overrides is None else dict(options.hf_overrides)
        return cls(dict(checkpoint.hf_config), dict(checkpoint.generation_config), overrides, options.model_impl)

    @property
    def merged(self) -> dict[str, Any]:
        """config.json with the overrides."""
        return {**self.hf_config, **(self.overrides or {})}

    @property
    def key(self) -> str | None:
        """The key of the description of Quire's own code, which `model_impl` "transformers" does not use."""
        return None if self.model_impl == "transformers" else make_key(self.merged, self.generation_config)

    def lacks_model(self) -> bool:
        """Return whether `make` would import a model of Quire's own, and keep what it found."""
        key = self.key
        return key is not None and has_model_file(self.merged) and not _path("model", key).exists()

    def make(self) -> ModelConfig:
        """`ModelRegistry.make_model_config`, from its file if there is one. Raises: as that."""
        key = self.key
        found = None if key is None else read("model", key, ModelConfig)
        if found is not None:
            return found if found.labels or found.label_tokens else replace(found, hf_config=self.merged)
        config = ModelRegistry.make_model_config(
            self.hf_config, self.generation_config, self.overrides, self.model_impl
        )
        if key is not None and config.implementation == "quire" and is_built_in(config.hf_config):
            write("model", key, config)
        return config


def plan_key(config: EngineConfig, checkpoint: Checkpoint, layer_groups: tuple[int, ...], rank: int = 0) -> str | None:
    """Return the key of a rank's plan; None where plans are not kept: random weights, chosen kernels, switched off."""
    if config.options.load_format == "dummy" or os.environ.get("QUIRE_KERNELS"):
        return None
    options = {name: value for name, value in asdict(config.options).items() if name not in INDIFFERENT}
    tensors = [(name, item.shape, item.format, len(item.stored)) for name, item in checkpoint.tensors.items()]
    scheduler = config.scheduler
    return make_key(
        config.model.hf_config, options, tensors, config.dtype, config.kv_dtype, config.keeps_stored_weights,
        scheduler.max_model_len, scheduler.block_size, layer_groups, rank,
    )  # fmt: skip


# --- Files --------------------------------------------------------------------------------------


def read(kind: str, key: str, value_type: type[T]) -> T | None:
    """Return the value of a file; None if it is missing, damaged or of another key."""
    path = _path(kind, key)
    try:
        first, _, body = path.read_bytes().partition(b"\n")
        header = msgspec.json.decode(first, type=Header)
        if header.key != key or header.sha256 != hashlib.sha256(body).hexdigest():
            return None
        value = msgspec.json.decode(body, type=value_type)
        os.utime(path)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return value


def write(kind: str, key: str, value: Any) -> None:
    """Keep a value, if it is the same when it is read again; a cache that cannot be written is left alone."""
    path = _path(kind, key)
    try:
        body = msgspec.json.encode(value)
        if msgspec.json.decode(body, type=type(value)) != value:
            return
        header = Header(key, hashlib.sha256(body).hexdigest(), f"quire {__version__}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(header) + b"\n" + body)
        os.replace(file.name, path)
        for old in sorted(path.parent.iterdir(), key=lambda item: item.stat().st_mtime)[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except (OSError, msgspec.MsgspecError, TypeError, ValueError) as error:
        logger.debug("the plan is not kept in %s: %s", path, error)


def read_all(kind: str, value_type: type[T]) -> list[T]:
    """Return every value of a kind, of any key."""
    found = []
    for path in sorted(plan_directory().glob(f"{kind}-*.json")):
        with suppress(OSError, msgspec.MsgspecError):
            header = msgspec.json.decode(path.read_bytes().partition(b"\n")[0], type=Header)
            found.append(read(kind, header.key, value_type))
    return [value for value in found if value is not None]


def has_plan(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Return whether the plan of rank 0 is kept: the model was split so before."""
    key = plan_key(config, checkpoint, config.scheduler.layer_groups) if config.uses_plan else None
    return key is not None and _path("plan", key).exists()


def missing_plans(config: EngineConfig, checkpoint: Checkpoint) -> list[int]:
    """Return the ranks whose plans would be kept, and are not."""
    if not config.uses_plan or not has_model_file(config.model.hf_config):
        return []
    keys = [
        plan_key(config.on_rank(rank), checkpoint, config.scheduler.layer_groups, rank)
        for rank in range(config.num_ranks)
    ]
    return [rank for rank, key in enumerate(keys) if key is not None and not _path("plan", key).exists()]


def forget(kind: str, key: str) -> None:
    """Delete a value, if it is kept."""
    with suppress(OSError):
        _path(kind, key).unlink(missing_ok=True)


def plan_directory() -> Path:
    """Return the directory of the files: `$QUIRE_PLAN_CACHE`, or one in Quire's cache directory."""
    chosen = os.environ.get("QUIRE_PLAN_CACHE", "")
    return cache_directory() / "plans" if chosen in ("", "1") else Path(chosen).expanduser()


def _path(kind: str, key: str) -> Path:
    return plan_directory() / f"{kind}-{key[:32]}.json"


def make_key(*parts: Any) -> str | None:
    """Return the digest of parts, and of what every file depends on; None where nothing is kept."""
    if os.environ.get("QUIRE_PLAN_CACHE") == "0" or ModelRegistry.has_registered():
        return None
    with suppress(TypeError):  # a configuration that is no JSON
        return hashlib.sha256(msgspec.json.encode([code_digest(), _native.isa(), *parts], order="sorted")).hexdigest()
    return None


@functools.cache
def code_digest() -> str:
    """Digest of the source that makes programs, of the extension's and torch's version."""
    package, digest = Path(__file__).parents[2], hashlib.sha256(__version__.encode())
    for path in sorted(path for folder in SOURCES for path in (package / folder).rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    extension, torch = Path(_native.__file__).stat(), PathFinder.find_spec("torch")
    digest.update(f"{extension.st_size} {extension.st_mtime_ns}".encode())
    if torch is not None and torch.origin is not None:
        with suppress(OSError):
            digest.update((Path(torch.origin).parent / "version.py").read_bytes())
    return digest.hexdigest()


def is_built_in(hf_config: Mapping[str, Any]) -> bool:
    """Return whether the model's code is Quire's own: that of others may change without notice."""
    return str(ModelRegistry.resolve(hf_config).__module__).startswith("quire.models.")


# --- Placements ---------------------------------------------------------------------------------


def _described(placement: Placement, tensors: Mapping[str, WeightTensor]) -> StoredPlacement | None:
    """Describe a placement by its checkpoint's tensor; None if it is not made of whole stored rows of that."""
    tensor = placement.whole or placement.tensor
    source = tensors.get(tensor.name)
    if source is None or not len(source.stored):
        return None
    first = (tensor.stored.ctypes.data - source.stored.ctypes.data) // source.stored.strides[0]
    has_own_order = tensor.row_order is not source.row_order
    order = None if tensor.row_order is None or not has_own_order else tensor.row_order.astype(np.int64).tobytes()
    is_flat = tensor.stored.shape[1:] != source.stored.shape[1:]
    described = StoredPlacement(
        placement.parameter_name, placement.first_row, tensor.name, tensor.shape,
        None if is_flat else (first, len(tensor.stored)),
        tensor.is_transposed, tensor.offset, has_own_order, order, placement.rows, placement.columns,
    )  # fmt: skip
    return described if _memory(_tensor_of(described, tensors)) == _memory(tensor) else None


def _restored(item: StoredPlacement, tensors: Mapping[str, WeightTensor]) -> Placement:
    tensor = _tensor_of(item, tensors)
    columns = slice(None) if item.columns is None else slice(*item.columns)
    part = tensor if item.rows is None else tensor.part(slice(*item.rows), columns)
    return Placement(part, item.parameter_name, item.first_row, tensor, item.rows, item.columns)


def _tensor_of(item: StoredPlacement, tensors: Mapping[str, WeightTensor]) -> WeightTensor:
    source = tensors[item.name]
    order, rows = source.row_order, slice(None)
    if item.stored_rows is None:
        source = replace(source, stored=source.stored.reshape(1, -1))
    else:
        rows = slice(item.stored_rows[0], sum(item.stored_rows))
    if item.has_own_order:
        order = None if item.row_order is None else np.frombuffer(item.row_order, np.int64)
    return replace(
        source, shape=item.shape, stored=source.stored[rows], row_order=order, is_transposed=item.is_transposed,
        offset=item.offset, scales=None if source.scales is None else source.scales[rows],
    )  # fmt: skip


def _memory(tensor: WeightTensor) -> list[Any]:
    """Return where a tensor's stored values lie."""
    arrays = (tensor.stored, tensor.scales)
    return [None if array is None else (array.ctypes.data, array.shape, array.strides) for array in arrays]
