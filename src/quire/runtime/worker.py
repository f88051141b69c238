"""`Worker`: one device's or rank's share of the engine: model, KV memory, sampler and the runner that runs steps.

Next to read: `model_runner.py`; `ranks.py` for the ranks of a model.
"""

import logging
from functools import partial

from quire import _native
from quire.cache_spec import LatentKV, PagedKV, RecurrentState
from quire.config import NARROW_KV_DTYPES, EngineConfig
from quire.errors import UnsupportedModelError
from quire.kernels.tracing import NotTraceableError
from quire.memory_plan import PROMPT_LOGPROB_ROWS
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.forward import EagerForward, Forward, PlannedForward
from quire.runtime.model_runner import ModelRunner
from quire.runtime.plan.emit import PlanLimits, PlannedModel
from quire.runtime.plan.stored_plan import load_plan
from quire.runtime.ranks import agree, make_group, make_sampler
from quire.weights.checkpoint import Checkpoint
from quire.weights.progress import Progress

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
_RANKS_NEED_PLAN = (
    "several ranks need a plan, and a plan cannot hold {error}: --tensor-parallel-size 1 runs the model op by op"
)


class Worker:
    """Loads the model onto its device; `runner` runs steps."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        exchange: _native.Exchange | None = None,
    ) -> None:
        """`exchange`: with the other ranks, if the worker is one rank of several.

        Mutates: torch's number of threads and current CUDA device, if torch is used: a stored plan needs none.

        Raises: ConfigError, ModelFileError, UnsupportedModelError.
        """
        self.config = config
        self.cache = CacheEngine(config)
        self.pool = _native.ThreadPool(config.threads_per_rank)
        self.sampler = make_sampler(config.model.vocab_size, config.device, self.pool, exchange)
        self.forward = self._make_forward(checkpoint, progress, exchange)
        self.runner = ModelRunner(config, self.forward, self.cache, self.sampler)
        if exchange is not None:
            self.runner.agree = partial(agree, exchange)

    def _make_forward(
        self, checkpoint: Checkpoint, progress: Progress | None, exchange: _native.Exchange | None
    ) -> Forward:
        config = self.config
        if config.uses_plan:
            group = make_group(config.model.vocab_size, exchange)
            try:
                plan = load_plan(config, checkpoint, self.cache.layer_groups, progress, group, exchange)
            except NotTraceableError as error:
                if exchange is not None:
                    raise UnsupportedModelError(_RANKS_NEED_PLAN.format(error=error)) from error
                if config.kv_dtype in NARROW_KV_DTYPES or config.options.quantization is not None:
                    raise UnsupportedModelError(_NEEDS_PLAN.format(error=error)) from error
                logger.warning("the model runs op by op, which is slower: a plan cannot hold %s", error)
            else:
                limits = PlanLimits(
                    max_tokens=config.scheduler.max_num_batched_tokens,
                    max_requests=config.scheduler.max_num_seqs,
                    max_logit_rows=max(config.scheduler.max_num_seqs, PROMPT_LOGPROB_ROWS),
                    tile_rows=config.tile_rows,
                )
                layers = kv_layers(config, self.cache)
                ops, weights, recording = plan
                return PlannedForward(
                    PlannedModel(ops, weights, layers, limits, self.pool, exchange, recording=recording)
                )
        import torch

        from quire.runtime.loader import load_model

        device = torch.device(config.device)
        torch.set_num_threads(config.threads_per_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        model = load_model(config, checkpoint, progress)
        return EagerForward(model, self.cache, config.scheduler.block_size, device)


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
            address, cache.block_stride_bytes, scheduler.block_size, num_kv_heads, head_size,
            KV_FORMATS[config.kv_dtype], group,
        )  # fmt: skip
        layers.append(layer)
    return layers
