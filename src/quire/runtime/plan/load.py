"""`load_plan`: a checkpoint to the program of a rank's share of the model, and its packed weights.

The model's code is traced at each start, which takes milliseconds and needs no PyTorch; stored weights go straight into
the kernels' layout. Next to read: `packed_weights.py` for formats, `emit.py` for what runs.
"""

import os
from typing import Any

from quire import nn
from quire.config import EngineConfig
from quire.kernels.registry import check_environment
from quire.kernels.tracing import NotTraceableError
from quire.layers.group import SINGLE, Group
from quire.lazy_torch import on_meta
from quire.runtime.loader import check_split, make_model, partitions_of, plan_placements, random_weights
from quire.runtime.placement import Placement
from quire.runtime.plan.lower import Program, lower
from quire.runtime.plan.packed_weights import PackedWeights, choose_packings
from quire.runtime.plan.stages import cut
from quire.runtime.plan.trace import trace_model
from quire.runtime.plan.weight_file import fill_weights
from quire.weights.checkpoint import Checkpoint
from quire.weights.progress import Progress


def load_plan(
    config: EngineConfig,
    checkpoint: Checkpoint,
    layer_groups: tuple[int, ...],
    progress: Progress | None = None,
    group: Group = SINGLE,
    stage: int = 0,
    rank: int = 0,
) -> tuple[Program, PackedWeights]:
    """Trace this rank's share of the model, then map or pack its weights. Raises: as `trace_program`."""
    program, weights, model = trace_program(config, checkpoint, layer_groups, group, stage)
    if config.options.load_format == "dummy":
        parameters, partitions = dict(nn.named_parameters(model)), partitions_of(model)
        for name, values in random_weights(parameters, config.options.seed, partitions, weights.shapes):
            weights.put_values(name, values)
    else:
        fill_weights(config, checkpoint, weights, progress, rank)
    return program, weights


def trace_program(
    config: EngineConfig, checkpoint: Checkpoint, layer_groups: tuple[int, ...], group: Group = SINGLE, stage: int = 0
) -> tuple[Program, PackedWeights, Any]:
    """Trace this rank's share of the model, and place its weights. Returns also the model, without values.

    `stage`: of `pipeline_parallel_size`.
    Raises: NotTraceableError before any weight is read, for models that must run op by op; ConfigError for a wrong
    `QUIRE_KERNELS` or `QUIRE_TRACE`; ModelFileError naming tensors that are missing, unexpected or of a wrong shape;
    UnsupportedModelError for more stages than the program can be cut into.
    """
    check_environment()
    check_split(config, checkpoint, group)
    if os.environ.get("QUIRE_KERNELS"):
        raise NotTraceableError(f"QUIRE_KERNELS={os.environ['QUIRE_KERNELS']}")
    with on_meta():
        model = make_model(config.model.hf_config, group, config.scheduler.max_model_len)
    traced = trace_model(model, layer_groups)
    weights, placements = plan_weights(config, checkpoint, model)
    weights.placements = placements
    program, num_stages = lower(traced, weights.packing_of), config.options.pipeline_parallel_size
    if num_stages > 1:
        program = cut(program, stage, num_stages)
        read = [parameter for instruction in (*program.body, *program.head) for parameter in instruction.parameters]
        weights = weights.only({weights.name_of(parameter) for parameter in read})
    return program, weights, model


def plan_weights(config: EngineConfig, checkpoint: Checkpoint, model: Any) -> tuple[PackedWeights, list[Placement]]:
    """Allocate the packed weights of a model, and plan the tensors that `PackedWeights.fill` puts there."""
    parameters, partitions = dict(nn.named_parameters(model)), partitions_of(model)
    random = config.options.load_format == "dummy"
    placements = [] if random else plan_placements(model, checkpoint.tensors)
    packings = choose_packings(config, parameters, partitions, placements)
    return PackedWeights(parameters, packings, config.threads_per_rank), placements
