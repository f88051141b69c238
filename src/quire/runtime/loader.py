"""`plan_placements`: from a model's structure and a checkpoint, the place of each stored tensor in a rank's parameters.

Of a sliced tensor only the rank's share is read. A model says what it needs by its parameters' names, by
`stacked_params`, `renames` and `ignored_tensors`, and by the `partitions` of its layers; nothing here knows an
architecture, and nothing reads weights.
Next to read: `plan/load.py` and `eager.py`, which do; `models/registry.py` for model classes.
"""

import functools
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire import nn
from quire.config import EngineConfig
from quire.errors import ConfigError, ModelFileError
from quire.layers.group import SINGLE, Group, LocalGroup, Partition, UnevenSplitError
from quire.lazy_torch import on_meta
from quire.models.hf_decoder import DecoderConfig
from quire.models.registry import ModelRegistry
from quire.runtime.placement import FLOATS, Placement
from quire.weights.block_formats import BLOCK_FORMATS
from quire.weights.checkpoint import Checkpoint
from quire.weights.weight_tensor import WeightTensor

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
    if max_model_len is not None and isinstance(config, DecoderConfig):
        config = config.for_length(max_model_len)
    return model_class(config, group)


def check_split(config: EngineConfig, checkpoint: Checkpoint, group: Group) -> None:
    """Check that the model and its stored blocks can be split among the ranks of the group.

    Raises: ConfigError naming what does not fit, and the nearest tensor-parallel sizes that do.
    """
    if group.size == 1 or (problem := _split_problem(config, checkpoint, group.size)) is None:
        return
    sizes = range(1, 2 * group.size + 1)
    fitting = [size for size in sizes if size == 1 or _split_problem(config, checkpoint, size) is None]
    below, above = [size for size in fitting if size < group.size], [size for size in fitting if size > group.size]
    nearest = " or ".join(map(str, below[-1:] + above[:1]))
    raise ConfigError(f"{problem}; the nearest that fits: --tensor-parallel-size {nearest}")


def _split_problem(config: EngineConfig, checkpoint: Checkpoint, size: int) -> str | None:
    try:
        with on_meta():
            model = make_model(config.model.hf_config, LocalGroup(0, size))
        if config.options.load_format != "dummy":
            block = 1 if config.options.quantization is None else QUANTIZATION_BLOCK
            plan_placements(model, checkpoint.tensors, block)
    except UnevenSplitError as error:
        return str(error)
    return None


def partitions_of(model: Any) -> dict[str, Partition]:
    """The partition of each sliced parameter, by the parameter's name."""
    found = {}
    for prefix, module in nn.named_modules(model):
        partitions: Mapping[str, Partition] = getattr(module, "partitions", {})
        for name, value in nn.attributes(module):
            if name in partitions and nn.is_parameter(value):
                found[f"{prefix}.{name}" if prefix else name] = partitions[name]
    return found


def plan_placements(model: Any, tensors: Mapping[str, WeightTensor], quantization_block: int = 1) -> list[Placement]:
    """Plan the place of each stored tensor. Tensors must cover every parameter exactly and be used or ignored.

    `quantization_block`: the columns that will share a scale; a rank must hold all of them.
    Raises: ModelFileError; UnevenSplitError where a rank's columns would cut a stored or a future block.
    """
    parameters, partitions = dict(nn.named_parameters(model)), partitions_of(model)
    # Further names of tied parameters: a checkpoint may store these a second time.
    aliases = dict(nn.named_parameters(model, repeats=True)).keys() - parameters.keys()
    # A classification head is the worker's own, beside the model.
    ignored = [re.compile(pattern) for pattern in (*getattr(model, "ignored_tensors", ()), rf"^{CLASSIFIER}$")]
    parts_of: dict[str, dict[int, WeightTensor]] = {name: {} for name in parameters}
    stacked = stacked_params(model)
    stacks: dict[str, list[WeightTensor]] = {}
    segments: Mapping[str, str] = getattr(model, "renamed_segments", {})
    unexpected = []
    for name, tensor in tensors.items():
        named = renamed(name, segments)
        target, part = target_of(named, model.renames, stacked)
        if target in parts_of and named.endswith(target) and part_names(target, stacked) != [target]:
            is_stack = len(tensor.shape) == parameters[target].ndim + 1
            whole = in_model_order(model, name, tensor)
            stacks[target] = list(_unstacked(model, target, tensor)) if is_stack else [whole]
        elif target in parts_of:
            parts_of[target][part] = in_model_order(model, name, tensor)
        elif target not in aliases and not any(pattern.search(name) for pattern in ignored):
            # GPTQ's tools give every layer a bias, zeros where the model has none.
            is_harmless = name.endswith(".bias") and not tensor.raw.any()
            unexpected.extend([] if is_harmless else [name])
    missing: list[str] = []
    placements: list[Placement] = []
    for target, found in parts_of.items():
        expected = [] if target in stacks else part_names(target, stacked)
        missing.extend(part for index, part in enumerate(expected) if index not in found)
        if len(found) == len(expected):
            parts = stacks.get(target) or [found[index] for index in range(len(expected))]
            partition = partitions.get(target, Partition())
            _check_shapes(target, partition.whole_shape(tuple(parameters[target].shape)), parts)
            _check_blocks(parts, partition, quantization_block)
            placements.extend(_place(target, parts, partition))
    _complain("lacks", missing)
    _complain("has unexpected", unexpected)
    return placements


def stacked_params(model: Any) -> dict[str, tuple[str, ...]]:
    """Return the stored parts of the model's stacked parameters: those that its experts have, then its own."""
    found: dict[str, tuple[str, ...]] = {}
    for _, module in nn.named_modules(model):
        found |= getattr(module, "stacked_params", {}) if module is not model else {}
    return found | dict(model.stacked_params)


def renamed(name: str, segments: Mapping[str, str]) -> str:
    """Return a stored name with these parts of it, one segment or several, replaced."""
    for stored, ours in segments.items():
        name = f".{name}.".replace(f".{stored}.", f".{ours}.")[1:-1]
    return name


def used_tensors(hf_config: Mapping[str, Any], tensors: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
    """Return the stored tensors that the model of a config does not ignore, under the names that it makes of theirs."""
    with on_meta():
        model = make_model(hf_config)
    ignored = [re.compile(pattern) for pattern in getattr(model, "ignored_tensors", ())]
    segments: Mapping[str, str] = getattr(model, "renamed_segments", {})
    used = (name for name in tensors if not any(pattern.search(name) for pattern in ignored))
    return {renamed(name, segments): tensors[name] for name in used}


def in_model_order(model: Any, name: str, tensor: WeightTensor) -> WeightTensor:
    """A stored tensor with the rows and values of its parameter, where the model says that they are stored otherwise.

    `transposed_params`: names of layers whose matrices are stored with inputs as rows. `row_orders`: per name of a
    layer the stored position of each row. `offset_params`: per name of a layer, perhaps with names before it, what is
    added to its values. `convolutions`: names of layers of convolutions.
    """
    segments = name.split(".")
    for layer, offset in getattr(model, "offset_params", {}).items():
        tensor = tensor.plus(offset) if f".{layer}." in f".{name}." else tensor
    if segments[-1] == "weight" and len(tensor.shape) > 1 and segments[-2] in getattr(model, "convolutions", ()):
        tensor = tensor.taps_first()
    if len(tensor.shape) == 2 and any(segment in getattr(model, "transposed_params", ()) for segment in segments):
        return tensor.transposed()
    orders = getattr(model, "row_orders", {})
    return next((_with_rows(tensor, orders[segment]) for segment in segments if segment in orders), tensor)


def _with_rows(tensor: WeightTensor, order: NDArray[np.int64]) -> WeightTensor:
    """The rows in another order. Raises: ModelFileError if the model's configuration makes more or fewer of them."""
    if len(order) != tensor.shape[0]:
        raise ModelFileError(
            f"the checkpoint has {tensor.name} {list(tensor.shape)}, but the model's configuration makes {len(order)} "
            "rows: configuration and weights do not belong together"
        )
    return tensor.with_rows(order)


def _unstacked(model: Any, target: str, tensor: WeightTensor) -> Iterator[WeightTensor]:
    """The parts of one tensor that holds all of a stacked parameter, as Transformers 5 may store experts.

    `transposed_stacks`: names of parameters of which each part, if it is not quantised, has inputs as rows.
    `stack_orders`: per name the stored position of each row of a part.
    """
    name = target.rpartition(".")[2]
    order, is_transposed = getattr(model, "stack_orders", {}).get(name), name in getattr(model, "transposed_stacks", ())
    for part in tensor.unstacked():
        matrix = part.transposed() if is_transposed and part.format in FLOATS else part
        yield matrix if order is None else _with_rows(matrix, order)


def target_of(name: str, renames: Mapping[str, str], stacked: Mapping[str, tuple[str, ...]]) -> tuple[str, int]:
    """A checkpoint's name to a parameter's name, and which part of a stacked parameter it is (0 if not stacked).

    Names of stacked parameters and of their parts are one or more segments of a name.
    """
    for prefix, replacement in renames.items():
        if name.startswith(prefix):
            name = replacement + name[len(prefix) :]
            break
    segments = name.split(".")
    for stacked_name, part_list in stacked.items():
        indices, length = _indices(part_list), part_list[0].count(".") + 1
        for position in range(len(segments) - length + 1):
            index = indices.get(".".join(segments[position : position + length]))
            if index is not None:
                return ".".join([*segments[:position], stacked_name, *segments[position + length :]]), index
    return name, 0


@functools.cache
def _indices(part_list: tuple[str, ...]) -> Mapping[str, int]:
    return {part: index for index, part in enumerate(part_list)}


def part_names(target: str, stacked: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The names of the parts which make up a parameter: itself, unless it is stacked."""
    segments = target.split(".")
    for stacked_name, part_list in stacked.items():
        length = stacked_name.count(".") + 1
        for position in range(len(segments) - length + 1):
            if ".".join(segments[position : position + length]) == stacked_name:
                return [".".join([*segments[:position], part, *segments[position + length :]]) for part in part_list]
    return [target]


def random_weights(
    parameters: Mapping[str, Any],
    seed: int,
    partitions: Mapping[str, Partition],
    wanted: Container[str] | None = None,
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Seeded fp32 values that keep activations of order one: matrices N(0, 1/columns), vectors 1 or, for biases, 0.

    A rank gets its share of the same matrices, without the padding of a vocabulary. `wanted`: names; None: all.
    """
    for index, (name, parameter) in enumerate(sorted(parameters.items())):
        if wanted is not None and name not in wanted:
            continue
        shape = tuple(parameter.shape)
        if len(shape) < 2:
            yield name, np.full(shape, 0.0 if name.endswith("bias") else 1.0, np.float32)
            continue
        partition = partitions.get(name, Partition())
        whole = np.random.default_rng((seed, index)).standard_normal(partition.whole_shape(shape), np.float32)
        whole *= np.float32(whole.shape[-1] ** -0.5)
        yield name, np.concatenate([whole[rows.start : rows.stop, partition.column_slice]
                                    for rows in partition.row_ranges(len(whole))])  # fmt: skip


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


def _place(target: str, parts: list[WeightTensor], partition: Partition) -> Iterator[Placement]:
    """Place the overlaps of this rank's rows with the stored tensors, which lie one below another."""
    first_row, share = 0, partition.columns
    columns = None if share is None else (share.start, share.stop)
    for rows in partition.row_ranges(sum(part.shape[0] for part in parts)):
        above = 0
        for part in parts:
            start, stop = max(rows.start, above), min(rows.stop, above + part.shape[0])
            if start < stop:
                is_whole = not partition.cuts_columns and stop - start == part.shape[0]
                if is_whole:
                    yield Placement(part, target, first_row)
                else:
                    cut = part.part(slice(start - above, stop - above), partition.column_slice)
                    yield Placement(cut, target, first_row, part, (start - above, stop - above), columns)
                first_row += stop - start
            above += part.shape[0]


def _complain(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - NUM_NAMES_SHOWN} more" if len(names) > NUM_NAMES_SHOWN else ""
        noun = "tensor" if len(names) == 1 else "tensors"
        shown = ", ".join(names[:NUM_NAMES_SHOWN])
        raise ModelFileError(
            f"the checkpoint {what} {noun} {shown}{more}: it is incomplete, or of another architecture than it says;"
            " fetch it again"
        )
