"""`Worker`: one device's or rank's share of the engine: model, KV memory, sampler and the runner that runs steps.

Next to read: `model_runner.py`; `ranks.py` for the ranks of a model.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire import _native
from quire.adapter import Adapter
from quire.cache_spec import LatentKV, PagedKV, RecurrentState
from quire.config import NARROW_KV_DTYPES, EngineConfig
from quire.errors import UnsupportedModelError
from quire.kernels.tracing import NotTraceableError
from quire.layers.group import SINGLE
from quire.lazy_torch import OP_BY_OP, require_torch
from quire.memory_plan import PROMPT_LOGPROB_ROWS
from quire.runtime.batch import RequestStates
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.disk_tier import open_disk_tier
from quire.runtime.forward import EagerForward, Forward, PlannedForward
from quire.runtime.links import ONE_RANK, Links
from quire.runtime.loader import load_classifier
from quire.runtime.model_runner import ModelRunner
from quire.runtime.plan.emit import PlanLimits, PlannedModel
from quire.runtime.plan.load import load_plan
from quire.runtime.ranks import StageRunner, Yielded, make_group, make_runner, make_sampler
from quire.sampling.sampler import Grammars
from quire.types import SchedulerOutput, StepResult
from quire.weights.checkpoint import Checkpoint
from quire.weights.model_files import Progress

if TYPE_CHECKING:
    from quire.runtime.adapter_pool import AdapterPool

logger = logging.getLogger("quire.runtime")
KV_FORMATS = {
    "float32": _native.KvFormat.f32,
    "float16": _native.KvFormat.f16,
    "bfloat16": _native.KvFormat.bf16,
    "int8": _native.KvFormat.i8,
    "fp8_e4m3": _native.KvFormat.e4m3,
    "fp8_e5m2": _native.KvFormat.e5m2,
}
_NEEDS_PLAN = (
    "int8 and FP8 KV and load-time quantisation need a plan, and a plan cannot hold {error}: leave kv_cache_dtype and "
    "quantization unset"
)
_ADAPTERS_NEED_PLAN = (
    "adapters are computed by plans on CPUs only, and this model runs op by op: leave lora and enable_lora out, or"
    " merge the adapter into the weights"
)
_RANKS_NEED_PLAN = (
    "several ranks run a plan unless told otherwise, and a plan cannot hold {error}: --enforce-eager runs the model op"
    " by op, on one stage (--pipeline-parallel-size 1)"
)


class Worker:
    """Loads the model onto its device; `runner` runs steps."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        links: Links = ONE_RANK,
        grammars: Grammars | None = None,
    ) -> None:
        """`links`: to the other ranks, if the worker is one rank of several. `grammars`: see `Sampler`.

        Mutates: torch's number of threads and current CUDA device, if the model runs op by op.

        Raises: ConfigError, ModelFileError, UnsupportedModelError.
        """
        self.config = config
        self.pool = _native.ThreadPool(config.threads_per_rank)
        self._disk = open_disk_tier(config, checkpoint, links.rank)
        self.adapters: AdapterPool | None = None  # most engines have none, nor drafts: they import neither
        self.forward, self.cache = self._make_forward(checkpoint, progress, links)
        # Rows of logits that a device plan does not sample are copied, and sampled as on a CPU.
        device = config.device if isinstance(self.forward, EagerForward) else "cpu"
        self.sampler = make_sampler(config.model.vocab_size, device, self.pool, links, grammars)
        has_copy = not isinstance(self.forward, PlannedForward | EagerForward)
        states, drafter = RequestStates.of(config.scheduler, has_copy=has_copy), None
        if config.model.draft is not None:
            from quire.runtime.draft_plan import load_drafter

            layers, group = kv_layers(config, self.cache), make_group(config.model.vocab_size, links.exchange)
            drafter = load_drafter(config, self.forward, layers, states, self.pool, group, links, progress)
        classifier = load_classifier(config, checkpoint) if config.model.labels else None
        parts = {"states": states, "classifier": classifier, "adapters": self.adapters, "drafter": drafter}
        self.runner = self._make_runner(links, parts)

    def follow(self, output: SchedulerOutput, yielded: Sequence[Yielded], wanted: Sequence[Adapter] = ()) -> StepResult:
        """Run a step on a rank whose result is not the engine's.

        `yielded`: of earlier steps; `wanted`: adapters that are read beside it.
        """
        if self.adapters is not None:
            self.adapters.prepare(wanted)
        if isinstance(self.runner, StageRunner):
            self.runner.take(yielded)
        return self.runner.run(output)

    def _make_runner(self, links: Links, parts: dict[str, Any]) -> ModelRunner:
        if isinstance(self.forward, PlannedForward | EagerForward):
            return make_runner(self.config, self.forward, self.cache, self.sampler, links, **parts)
        from quire.runtime.device.forward import DeviceForward
        from quire.runtime.device.runner import DeviceRunner

        assert isinstance(self.forward, DeviceForward)
        return DeviceRunner(self.config, self.forward, self.cache, self.sampler, **parts)

    def _make_forward(
        self, checkpoint: Checkpoint, progress: Progress | None, links: Links
    ) -> tuple[Forward, CacheEngine]:
        config = self.config
        if config.uses_plan:
            group = make_group(config.model.vocab_size, links.exchange)
            try:
                program, weights = load_plan(
                    config, checkpoint, config.scheduler.layer_groups, progress, group, links.stage, links.rank
                )
            except NotTraceableError as error:
                if config.num_ranks > 1:
                    raise UnsupportedModelError(_RANKS_NEED_PLAN.format(error=error)) from error
                if config.kv_dtype in NARROW_KV_DTYPES or config.options.quantization is not None:
                    raise UnsupportedModelError(_NEEDS_PLAN.format(error=error)) from error
                require_torch(f"a plan cannot hold {error}, and running op by op")
                logger.warning("the model runs op by op, which is slower: a plan cannot hold %s", error)
            else:
                limits = PlanLimits(
                    max_tokens=config.scheduler.max_num_batched_tokens,
                    max_requests=config.scheduler.max_num_seqs,
                    max_logit_rows=max(config.scheduler.max_num_seqs, PROMPT_LOGPROB_ROWS),
                    tile_rows=config.tile_rows,
                    kv_ahead_bytes=config.hardware.kv_ahead_bytes,
                    fetches_experts=config.weights_on_disk,
                )
                if program.layers is not None:
                    config = replace(config, scheduler=config.scheduler.of_layers(program.layers))
                cache = CacheEngine(config, self._disk)
                if config.options.has_adapters:
                    from quire.runtime.adapter_pool import AdapterPool

                    self.adapters = AdapterPool(config, group)
                sites = None if self.adapters is None else self.adapters.site
                layers = kv_layers(config, cache)
                planned = PlannedModel(program, weights, layers, limits, self.pool, links.exchange, sites)
                return PlannedForward(planned, links, self.adapters), cache
        if config.options.has_adapters:
            raise UnsupportedModelError(_ADAPTERS_NEED_PLAN)
        torch = require_torch(OP_BY_OP)
        device = torch.device(config.device)
        torch.set_num_threads(config.threads_per_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if config.gpu_kernels != "off":
            from quire.runtime.device.forward import DeviceForward
            from quire.runtime.device.load import load_device_plan

            cache = CacheEngine(config, self._disk)
            try:
                return DeviceForward(load_device_plan(config, checkpoint, cache, progress)), cache
            except NotTraceableError as error:
                logger.warning("the model runs op by op, which is slower: a device plan cannot hold %s", error)
                return self._make_eager(checkpoint, progress, links, cache), cache
        cache = CacheEngine(config, self._disk)
        return self._make_eager(checkpoint, progress, links, cache), cache

    def _make_eager(
        self, checkpoint: Checkpoint, progress: Progress | None, links: Links, cache: CacheEngine
    ) -> EagerForward:
        import torch

        from quire.runtime.eager import load_model

        config, device = self.config, torch.device(self.config.device)
        model = load_model(config, checkpoint, progress, links.group or SINGLE)
        return EagerForward(model, cache, config.scheduler.block_size, device, links.group)


def kv_layers(config: EngineConfig, cache: CacheEngine) -> list[_native.KvLayer]:
    """Each layer's share of the KV pool, as native ops address it."""
    scheduler = config.scheduler
    layers = []
    for group, address in zip(cache.layer_groups, cache.layer_addresses, strict=True):
        spec = scheduler.kv_cache_groups[group].spec
        if isinstance(spec, RecurrentState):
            # Ops on states read only where pages are; sizes and format are those of no state.
            num_kv_heads, head_size = 1, 2
        elif isinstance(spec, LatentKV):
            num_kv_heads, head_size = 1, spec.rank + spec.rotary_size
        elif isinstance(spec, PagedKV):
            num_kv_heads, head_size = spec.num_kv_heads, spec.head_size
        else:
            raise UnsupportedModelError(
                f"a plan cannot hold {type(spec).__name__} caches: --enforce-eager runs the model op by op"
            )
        layer = _native.KvLayer(
            address,
            cache.block_stride_bytes,
            scheduler.block_size,
            num_kv_heads,
            head_size,
            KV_FORMATS[config.kv_dtype],
            group,
        )
        layers.append(layer)
    return layers
