"""`make_share`: from a configuration and a checkpoint a rank's share of the model, and the place of each stored tensor.

Of a sliced tensor only the rank's share is read. `weight_map` says of what parameters are made, the `partitions` of
layers what of them a rank holds; nothing here knows an architecture, and nothing reads weights.
Next to read: `plan/load.py` and `eager.py`, which do; `models/registry.py` for model classes.
"""

import bisect
import itertools
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import nn
from quire.config import EngineConfig, ModelConfig
from quire.errors import ConfigError, ModelFileError
from quire.layers.group import SINGLE, Group, LocalGroup, Partition, UnevenSplitError
from quire.lazy_torch import on_meta
from quire.models.hf_llama import LlamaConfig
from quire.models.hf_predictor import EagleConfig, add_eagle, add_predictors, with_stored_predictors
from quire.models.registry import ModelRegistry
from quire.runtime.plan.packed_weights import Placement, kept_bytes
from quire.weight_map import weight_map
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.quantized import RoundedTensor
from quire.weights.sources import ModelFiles
from quire.weights.weight_tensor import BLOCK_FORMATS, FLOATS, WeightTensor

NUM_NAMES_SHOWN = 3
CLASSIFIER = "score.weight"
QUANTIZATION_BLOCK = 32
"""Weights that are quantised at load share a scale per 32 inputs."""


def load_classifier(config: EngineConfig, checkpoint: Checkpoint) -> NDArray[np.float32] | None:
    """Read the classification head; None if the model has none. Raises: ModelFileError.

    Shapes: -> [labels, E].
    """
    shape = len(config.model.labels), config.model.hidden_size
    if not shape[0]:
        return None
    if config.options.load_format == "dummy":
        return np.random.default_rng(config.options.seed).normal(0, shape[1] ** -0.5, shape).astype(np.float32)
    tensor = checkpoint.tensors.get(CLASSIFIER)
    if tensor is None or tensor.shape != shape:
        found = "lacks it" if tensor is None else f"has {list(tensor.shape)}"
        raise ModelFileError(
            f"the model's config names {shape[0]} labels: {CLASSIFIER} {list(shape)}; the file {found}"
        )
    return tensor.to_numpy()


def make_model(hf_config: Mapping[str, Any], group: Group = SINGLE, max_model_len: int | None = None) -> Any:
    """Instantiate the class registered for `hf_config["architectures"]`, of `quire.nn` or from outside of `torch.nn`.

    `max_model_len`: tokens of the longest sequence, for models that choose rotary frequencies by it; None: the
    model's context.
    Raises: UnsupportedModelError; UnevenSplitError if the group's size does not divide the model.
    """
    model_class = ModelRegistry.resolve(hf_config)
    config = model_class.Config.from_hf(hf_config)
    if max_model_len is not None and isinstance(config, LlamaConfig):
        config = config.for_length(max_model_len)
    return model_class(config, group)


def make_stored(hf_config: Mapping[str, Any], names: Collection[str]) -> Any:
    """Instantiate the model with those layers that predict further tokens of which there are tensors of these names."""
    model = make_model(hf_config)
    if getattr(model.config, "num_predictors", 0):
        with_stored_predictors(model, names)
    return model


def weigh(model: ModelConfig, tensors: Mapping[str, WeightTensor]) -> ModelConfig:
    """Return the model's facts with the bytes of its stored weights, and the share of these in experts.

    Raises: ModelFileError for more layers than tensors: a map of them would take more memory than the weights.
    """
    if not tensors:
        return model
    if model.num_layers > len(tensors):
        raise ModelFileError(
            f"the model's config has {model.num_layers} layers, but the checkpoint has only {len(tensors)} tensors: "
            "configuration and weights do not belong together"
        )
    stored_bytes, share = kept_bytes(tensors.values()), 0.0
    if model.chosen_share < 1:
        with on_meta():
            experts = weight_map(make_model(model.hf_config), tensors).experts
        share = kept_bytes(tensors[name] for name in experts if name in tensors) / stored_bytes
    return replace(model, stored_bytes=stored_bytes, expert_share=share)


@dataclass(frozen=True, slots=True)
class ModelShare:
    """A rank's share of a model, whose parameters have no values yet.

    Fields:
        parameters: of the model, by name.
        partitions: of the sliced parameters, by name.
        placements: of stored tensors; none for random weights.
    """

    model: Any
    parameters: Mapping[str, Any]
    partitions: Mapping[str, Partition]
    placements: list[Placement]


def make_share(config: EngineConfig, checkpoint: Checkpoint, group: Group = SINGLE) -> ModelShare:
    """Make a rank's share of the model, and plan the places of the stored tensors.

    Raises: ConfigError naming what the ranks cannot share, and the nearest tensor-parallel sizes that fit;
    ModelFileError naming tensors that are missing, unexpected or of a wrong shape; UnsupportedModelError.
    """
    try:
        return _make_share(config, checkpoint, group)
    except UnevenSplitError as error:
        sizes = [size for size in range(1, 2 * group.size + 1) if _fits(config, checkpoint, size)]
        below, above = [size for size in sizes if size < group.size], [size for size in sizes if size > group.size]
        nearest = " or ".join(map(str, below[-1:] + above[:1]))
        raise ConfigError(f"{error}; the nearest that fits: --tensor-parallel-size {nearest}") from error


def _make_share(config: EngineConfig, checkpoint: Checkpoint, group: Group) -> ModelShare:
    model = make_model(config.model.hf_config, group, config.scheduler.max_model_len)
    tensors = checkpoint.tensors
    if config.speculative == "mtp":
        add_predictors(model)
    elif config.speculative == "eagle":
        assert config.model.draft is not None
        add_eagle(model, EagleConfig.from_hf(config.model.draft.model.hf_config))
        if tensors:
            of_head = open_checkpoint(draft_files(config)).tensors
            tensors = {**tensors, **{f"eagle.{name}": tensor for name, tensor in of_head.items()}}
    if config.options.load_format == "dummy":
        return ModelShare(model, dict(nn.named_parameters(model)), partitions_of(model), [])
    return plan_share(model, tensors, config)


def draft_files(config: EngineConfig) -> ModelFiles:
    """Return the files of the draft model."""
    draft = config.model.draft
    assert draft is not None
    return ModelFiles(str(config.options.draft_model), Path(draft.path), draft.file_kind, "local")


def _fits(config: EngineConfig, checkpoint: Checkpoint, size: int) -> bool:
    try:
        with on_meta():
            _make_share(config, checkpoint, LocalGroup(0, size))
    except UnevenSplitError:
        return False
    return True


def plan_share(model: Any, tensors: Mapping[str, WeightTensor], config: EngineConfig | None = None) -> ModelShare:
    """Plan the place of each stored tensor. Tensors must cover every parameter exactly and be used or known.

    `config`: of weights that are quantised at load.
    Raises: ModelFileError; UnevenSplitError where a rank's columns would cut a stored or a future block.
    """
    quantization = None if config is None else config.options.quantization
    needed = weight_map(model, tensors)
    names = {source.name for sources in needed.sources.values() for source in sources}
    _complain(
        "lacks",
        [source.name for sources in needed.sources.values() for source in sources if source.name not in tensors],
    )
    # GPTQ's tools give every layer a bias, zeros where the model has none.
    _complain(
        "has unexpected",
        [
            name
            for name, tensor in tensors.items()
            if name not in names
            and name not in needed.unused
            and name != CLASSIFIER
            and not (name.endswith(".bias") and not tensor.raw.any())
        ],
    )
    share = ModelShare(model, dict(nn.named_parameters(model)), partitions_of(model), [])
    for target, sources in needed.sources.items():
        stored = [(tensors[source.name], source.views) for source in sources]
        parts = [tensor.viewed(views) if views else tensor for tensor, views in stored]
        partition = share.partitions.get(target, Partition())
        _check_shapes(target, partition.whole_shape(tuple(share.parameters[target].shape)), parts)
        _check_blocks(parts, partition, 1 if quantization is None else QUANTIZATION_BLOCK)
        if config is not None and quantization == "fp8" and config.keeps_stored_weights:
            parts = [_rounded(part, share.parameters[target], config.model.vocab_size) for part in parts]
        share.placements.extend(_place(target, parts, partition))
    return share


def partitions_of(model: Any) -> dict[str, Partition]:
    """The partition of each sliced parameter, by the parameter's name."""
    found, types = {}, nn.parameter_types()
    for prefix, module in nn.named_modules(model):
        partitions: Mapping[str, Partition] = getattr(module, "partitions", {})
        for name, value in nn.attributes(module):
            if name in partitions and isinstance(value, types):
                found[f"{prefix}.{name}" if prefix else name] = partitions[name]
    return found


def random_weights(
    share: ModelShare, seed: int, wanted: Container[str] | None = None
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Seeded fp32 values that keep activations of order one: matrices N(0, 1/columns), vectors 1 or, for biases, 0.

    A rank gets its share of the same matrices, without the padding of a vocabulary. `wanted`: names; None: all.
    """
    for index, (name, parameter) in enumerate(sorted(share.parameters.items())):
        if wanted is not None and name not in wanted:
            continue
        shape = tuple(parameter.shape)
        if len(shape) < 2:
            yield name, np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
            continue
        partition = share.partitions.get(name, Partition())
        whole = np.random.default_rng((seed, index)).standard_normal(partition.whole_shape(shape), np.float32)
        whole *= np.float32(whole.shape[-1] ** -0.5)
        yield (
            name,
            np.concatenate(
                [whole[rows.start : rows.stop, partition.column_slice] for rows in partition.row_ranges(len(whole))]
            ),
        )


def _check_shapes(target: str, shape: tuple[int, ...], parts: list[WeightTensor]) -> None:
    num_rows = sum(part.shape[0] if part.shape else 0 for part in parts)
    if (num_rows, *parts[0].shape[1:]) != shape or len({part.shape[1:] for part in parts}) > 1:
        stored = ", ".join(f"{part.name} {list(part.shape)}" for part in parts)
        raise ModelFileError(
            f"the checkpoint has {stored}, but the model's configuration makes {target} {list(shape)}:"
            " configuration and weights do not belong together"
        )


def _check_blocks(parts: list[WeightTensor], partition: Partition, quantization_block: int) -> None:
    columns = partition.columns
    if columns is None or not partition.cuts_columns:
        return
    for part in parts:
        stored_block = BLOCK_FORMATS[part.format].block_len if part.format in BLOCK_FORMATS else QUANTIZATION_BLOCK
        block = max(stored_block, quantization_block)
        # A matrix whose columns are not whole blocks is not quantised.
        if columns.whole % block == 0 and columns.size % block:
            raise UnevenSplitError(
                f"tensor_parallel_size={columns.whole // columns.size} gives each rank {columns.size} of the"
                f" {columns.whole} columns of {part.name}, which are quantised in blocks of {block}"
            )


def _rounded(part: WeightTensor, parameter: Any, vocab_size: int) -> WeightTensor:
    """Return a float matrix with its values rounded to E4M3, and anything else, as tables and heads, as it was."""
    if len(part.shape) != 2 or part.format not in FLOATS or part.shape[1] % QUANTIZATION_BLOCK:
        return part
    is_kept = getattr(parameter, "keeps_dtype", False) or part.shape[0] == vocab_size
    return part if is_kept else RoundedTensor.of(part)


def _place(target: str, parts: list[WeightTensor], partition: Partition) -> Iterator[Placement]:
    """Place the overlaps of this rank's rows with the stored tensors, which lie one below another."""
    first_row = 0
    tops = [0, *itertools.accumulate(part.shape[0] for part in parts)]
    for rows in partition.row_ranges(tops[-1]):
        for index in range(bisect.bisect(tops, rows.start) - 1, bisect.bisect_left(tops, rows.stop)):
            part, top = parts[index], tops[index]
            start, stop = max(rows.start - top, 0), min(rows.stop - top, part.shape[0])
            if partition.cuts_columns or stop - start < part.shape[0]:
                part = part.part(slice(start, stop), partition.column_slice)
            yield Placement(part, target, first_row)
            first_row += stop - start


def _complain(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - NUM_NAMES_SHOWN} more" if len(names) > NUM_NAMES_SHOWN else ""
        noun = "tensor" if len(names) == 1 else "tensors"
        shown = ", ".join(names[:NUM_NAMES_SHOWN])
        raise ModelFileError(
            f"the checkpoint {what} {noun} {shown}{more}: it is incomplete, or of another architecture than it says;"
            " fetch it again"
        )
