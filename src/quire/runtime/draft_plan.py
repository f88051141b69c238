"""`load_drafter`: the drafter that a configuration says, with its plan. Next to read: `drafter.py`."""

from collections.abc import Sequence
from pathlib import Path

from quire import _native
from quire.config import DraftModel, EngineConfig
from quire.errors import UnsupportedModelError
from quire.kernels.tracing import NotTraceableError
from quire.layers.group import Group
from quire.runtime.batch import RequestStates
from quire.runtime.drafted_blocks import DraftedBlocks, draft_group
from quire.runtime.drafter import Drafter, ModelDrafter
from quire.runtime.forward import Forward, PlannedForward
from quire.runtime.head_drafter import HeadDrafter
from quire.runtime.links import Links
from quire.runtime.plan.emit import PlanLimits, PlannedModel
from quire.runtime.plan.load import load_plan
from quire.runtime.plan.lower import Program
from quire.runtime.plan.packed_weights import PackedWeights
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.progress import Progress
from quire.weights.sources import ModelFiles


def load_drafter(
    config: EngineConfig,
    forward: Forward,
    kv_layers: Sequence[_native.KvLayer],
    states: RequestStates,
    pool: _native.ThreadPool,
    group: Group,
    links: Links,
    progress: Progress | None = None,
) -> Drafter:
    """Load the draft model, or use the layer that was loaded with the model. `kv_layers`: of all layers.

    Raises: ConfigError, ModelFileError; UnsupportedModelError for a model that must run op by op.
    """
    draft, scheduler = config.model.draft, config.scheduler
    assert draft is not None
    limits = PlanLimits(
        max_tokens=scheduler.max_num_batched_tokens, max_requests=scheduler.max_num_seqs,
        max_logit_rows=scheduler.max_num_seqs, tile_rows=config.tile_rows,
        kv_ahead_bytes=config.hardware.kv_ahead_bytes,
    )  # fmt: skip
    if draft.is_own_layer:
        if not isinstance(forward, PlannedForward) or forward.planned.program.predictor is None:
            raise UnsupportedModelError(
                "speculative='mtp' needs a native plan of the model, and a plan cannot hold it: --speculative off fits"
            )
        program, weights = forward.planned.program.predictor, forward.planned.weights
        planned = PlannedModel(program, weights, kv_layers, limits, pool, links.exchange)
        return HeadDrafter(planned, states, scheduler.max_model_len, links)
    program, weights = _load_model(config, draft, group, links, progress)
    planned = PlannedModel(program, weights, kv_layers[config.model.num_layers :], limits, pool, links.exchange)
    layers = range(config.model.num_layers, len(config.model.all_cache_specs))
    blocks = DraftedBlocks(scheduler, draft_group(scheduler, layers))
    return ModelDrafter(planned, states, blocks, draft.model.context_len, links)


def _load_model(
    config: EngineConfig, draft: DraftModel, group: Group, links: Links, progress: Progress | None
) -> tuple[Program, PackedWeights]:
    files = ModelFiles(str(config.options.draft_model), Path(draft.path), draft.file_kind, "local")
    is_random = config.options.load_format == "dummy"
    checkpoint = Checkpoint(files, draft.model.hf_config) if is_random else open_checkpoint(files)
    own = config.of_draft()
    try:
        return load_plan(own, checkpoint, own.scheduler.layer_groups, progress, group, 0, links.rank)
    except NotTraceableError as error:
        raise UnsupportedModelError(
            f"draft_model={config.options.draft_model!r} runs as a native plan, and a plan cannot hold {error}: choose"
            " another draft model"
        ) from error
