"""`load_plan`: a checkpoint to the program of a rank's share of the model, and its packed weights.

The model's code is traced at each start, which takes milliseconds and needs no PyTorch; stored weights go straight into
the kernels' layout. Next to read: `packed_weights.py` for formats, `emit.py` for what runs.
"""

import os

from quire.config import EngineConfig
from quire.kernels.registry import check_environment
from quire.kernels.tracing import NotTraceableError
from quire.layers.group import SINGLE, Group
from quire.lazy_torch import on_meta
from quire.models.hf_predictor import NUM_KEPT
from quire.runtime.loader import ModelShare, make_share, random_weights
from quire.runtime.plan.lower import Program, lower, lower_body
from quire.runtime.plan.packed_weights import PackedWeights, choose_packings
from quire.runtime.plan.stages import Send, cut
from quire.runtime.plan.trace import trace_join, trace_model
from quire.runtime.plan.weight_file import fill_weights
from quire.weights.checkpoint import Checkpoint
from quire.weights.model_files import Progress


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
    program, weights, share = trace_program(config, checkpoint, layer_groups, group, stage)
    if config.options.load_format == "dummy":
        for name, values in random_weights(share, config.options.seed, weights.shapes):
            weights.put_values(name, values)
    else:
        fill_weights(config, checkpoint, weights, progress, rank)
    return program, weights


def trace_program(
    config: EngineConfig, checkpoint: Checkpoint, layer_groups: tuple[int, ...], group: Group = SINGLE, stage: int = 0
) -> tuple[Program, PackedWeights, ModelShare]:
    """Make and trace this rank's share of the model, and allocate its packed weights.

    `stage`: of `pipeline_parallel_size`.
    Raises: NotTraceableError before any weight is read, for models that must run op by op; ConfigError for a wrong
    `QUIRE_KERNELS` or `QUIRE_TRACE`; UnsupportedModelError for more stages than the program can be cut into; as
    `make_share`.
    """
    check_environment()
    if os.environ.get("QUIRE_KERNELS"):
        raise NotTraceableError(f"QUIRE_KERNELS={os.environ['QUIRE_KERNELS']}")
    with on_meta():
        share = make_share(config, checkpoint, group)
    program, weights = trace_share(config, share, layer_groups)
    num_stages = config.options.pipeline_parallel_size
    if num_stages > 1:
        program = cut(program, stage, num_stages)
        read = [parameter for instruction in (*program.body, *program.head) for parameter in instruction.parameters]
        weights = weights.only({weights.name_of(parameter) for parameter in read})
    return program, weights, share


def trace_share(
    config: EngineConfig, share: ModelShare, layer_groups: tuple[int, ...]
) -> tuple[Program, PackedWeights]:
    """Trace a rank's share of a model, and choose the formats of its weights. Raises: NotTraceableError."""
    traced = trace_model(share.model, layer_groups)
    weights = plan_weights(config, share)
    program = lower(traced, weights.packing_of)
    if config.speculative in ("mtp", "eagle"):
        for index in range(len(share.model.mtp or (share.model.eagle,))):
            traced_layer = trace_model(share.model, layer_groups, predictor=index)
            program.predictors.append(lower(traced_layer, weights.packing_of))
    if config.speculative == "eagle":
        if len(program.outputs) != NUM_KEPT:
            raise NotTraceableError("a forward that an EAGLE head cannot read")
        program.body.append(Send(program.outputs))
        program.joins = lower_body(*trace_join(share.model), weights.packing_of)
    return program, weights


def plan_weights(config: EngineConfig, share: ModelShare) -> PackedWeights:
    """Return the packed weights of a rank's share of a model, which are not filled yet."""
    packings = choose_packings(config, share.parameters, share.partitions, share.placements)
    return PackedWeights(share.parameters, packings, config.threads_per_rank, share.placements)
