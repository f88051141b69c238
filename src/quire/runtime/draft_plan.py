"""`load_drafter`: the drafter that a configuration says, with its plan. Next to read: `drafter.py`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.config import DraftModel, EngineConfig
from quire.errors import ModelFileError, UnsupportedModelError
from quire.kernels.tracing import NotTraceableError
from quire.layers.group import Group
from quire.memory_plan import all_cache_specs
from quire.runtime.batch import RequestStates
from quire.runtime.drafter import Drafter, ModelDrafter
from quire.runtime.forward import Forward, PlannedForward
from quire.runtime.head_drafter import EagleDrafter, HeadDrafter
from quire.runtime.links import Links
from quire.runtime.loader import draft_files
from quire.runtime.plan.emit import PlanLimits, PlannedModel
from quire.runtime.plan.load import load_plan
from quire.runtime.plan.lower import Program
from quire.runtime.plan.packed_weights import PackedWeights
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.model_files import Progress


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
        max_tokens=scheduler.max_num_batched_tokens,
        max_requests=scheduler.max_num_seqs,
        max_logit_rows=scheduler.max_num_seqs,
        tile_rows=config.tile_rows,
        kv_ahead_bytes=config.hardware.kv_ahead_bytes,
    )
    if draft.kind != "draft":
        if not isinstance(forward, PlannedForward) or not forward.planned.program.predictors:
            raise UnsupportedModelError(
                f"speculative={draft.kind!r} needs a native plan, and a plan cannot hold the model: --speculative off"
                " without --draft-model fits"
            )
        programs, weights = forward.planned.program.predictors, forward.planned.weights
        # Of each request, positions are computed again that a layer read with guesses.
        again = scheduler.max_num_seqs * (len(programs) - 1)
        limits = replace(limits, max_tokens=limits.max_tokens + again)
        heads = [PlannedModel(program, weights, kv_layers, limits, pool, links.exchange) for program in programs]
        context_len = min(scheduler.max_model_len, draft.model.context_len)
        if (joins := forward.planned.program.joins) is None:
            return HeadDrafter(heads, states, context_len, links)
        joining = PlannedModel(joins, weights, kv_layers, limits, pool, links.exchange)
        return EagleDrafter(heads[0], states, context_len, links, joining, forward.planned.outputs, _token_ids(config))
    program, weights = _load_model(config, draft, group, links, progress)
    planned = PlannedModel(program, weights, kv_layers[config.model.num_layers :], limits, pool, links.exchange)
    layers = range(config.model.num_layers, len(all_cache_specs(config.model)))
    return ModelDrafter(planned, states, draft.model.context_len, links, scheduler, layers)


def _config_of(config: EngineConfig, draft: DraftModel) -> EngineConfig:
    """Return the configuration of a draft model: in its own arithmetic, with the layers behind the model's."""
    first = config.model.num_layers
    layers = range(first, first + len(draft.model.cache_specs))
    options = replace(config.options, quantization=None, hf_overrides=None, draft_model=None, speculative="off")
    return replace(
        config,
        model=draft.model,
        options=options,
        scheduler=config.scheduler.of_layers(layers),
        dtype="bfloat16",
        keeps_stored_weights=True,
        weights_on_disk=False,
        speculative="off",
    )


def _token_ids(config: EngineConfig) -> NDArray[np.int64]:
    """Return the model's id of each token of an EAGLE head. Raises: ModelFileError."""
    draft = config.model.draft
    assert draft is not None
    count = int(draft.model.hf_config["draft_vocab_size"])
    ids = np.arange(count)
    if config.options.load_format == "dummy" or count == draft.model.vocab_size:
        return ids
    stored = open_checkpoint(draft_files(config)).tensors.get("d2t")
    if stored is None or stored.format != "I64" or stored.shape != (count,):
        found = "lacks it" if stored is None else f"has {stored.format} {list(stored.shape)}"
        raise ModelFileError(f"{draft.path}: an EAGLE-3 head needs the tensor d2t, I64 [{count}]; the file {found}")
    ids = ids + stored.stored.reshape(-1).view(np.int64)
    if ids.min() < 0 or ids.max() >= draft.model.vocab_size:
        raise ModelFileError(f"{draft.path}: d2t leads to tokens outside of the vocabulary of {draft.model.vocab_size}")
    return ids


def _load_model(
    config: EngineConfig, draft: DraftModel, group: Group, links: Links, progress: Progress | None
) -> tuple[Program, PackedWeights]:
    files = draft_files(config)
    is_random = config.options.load_format == "dummy"
    checkpoint = Checkpoint(files, draft.model.hf_config) if is_random else open_checkpoint(files)
    own = _config_of(config, draft)
    try:
        return load_plan(own, checkpoint, own.scheduler.layer_groups, progress, group, 0, links.rank)
    except NotTraceableError as error:
        raise UnsupportedModelError(
            f"draft_model={config.options.draft_model!r} runs as a native plan, and a plan cannot hold {error}: choose"
            " another draft model"
        ) from error
