"""`Worker`: one device's or rank's share of the engine: model, KV memory, sampler and the runner that runs steps.

Next to read: `model_runner.py`; `ranks.py` for the ranks of a model.
"""

import logging
from functools import partial

import torch

from quire import _native
from quire.cache_spec import PagedKV, RecurrentState
from quire.config import EngineConfig
from quire.errors import UnsupportedModelError
from quire.kernels.tracing import NotTraceableError
from quire.memory_plan import PROMPT_LOGPROB_ROWS
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.forward import EagerForward, Forward, PlannedForward
from quire.runtime.loader import load_model
from quire.runtime.model_runner import ModelRunner
from quire.runtime.plan.emit import PlanLimits, PlannedModel
from quire.runtime.plan.load import plan_model
from quire.runtime.ranks import agree, make_group, make_sampler
from quire.weights.checkpoint import Checkpoint
from quire.weights.progress import Progress

logger = logging.getLogger("quire.runtime")
KV_FORMATS = {
    "float32": _native.KvFormat.f32,
    "float16": _native.KvFormat.f16,
    "bfloat16": _native.KvFormat.bf16,
    "int8": _native.KvFormat.i8,
}
_NEEDS_PLAN = (
    "int8 KV and load-time quantisation need a plan, and a plan cannot hold {error}: leave kv_cache_dtype and "
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

        Mutates: torch's number of threads and current CUDA device, once for the process.

        Raises: ConfigError, ModelFileError, UnsupportedModelError.
        """
        torch.set_num_threads(config.threads_per_rank)
        device = torch.device(config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.config = config
        self.cache = CacheEngine(config)
        self.pool = _native.ThreadPool(config.threads_per_rank)
        self.sampler = make_sampler(config.model.vocab_size, device, self.pool, exchange)
        self.forward = self._make_forward(checkpoint, device, progress, exchange)
        self.runner = ModelRunner(config, self.forward, self.cache, self.sampler)
        if exchange is not None:
            self.runner.agree = partial(agree, exchange)

    def _make_forward(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        progress: Progress | None,
        exchange: _native.Exchange | None,
    ) -> Forward:
        config = self.config
        if config.uses_plan:
            group = make_group(config.model.vocab_size, exchange)
            try:
                program, weights = plan_model(config, checkpoint, self.cache.layer_groups, progress, group)
            except NotTraceableError as error:
                if exchange is not None:
                    raise UnsupportedModelError(_RANKS_NEED_PLAN.format(error=error)) from error
                if config.kv_dtype == "int8" or config.options.quantization is not None:
                    raise UnsupportedModelError(_NEEDS_PLAN.format(error=error)) from error
                logger.warning("the model runs op by op, which is slower: a plan cannot hold %s", error)
            else:
                limits = PlanLimits(
                    max_tokens=config.scheduler.max_num_batched_tokens,
                    max_requests=config.scheduler.max_num_seqs,
                    max_logit_rows=max(config.scheduler.max_num_seqs, PROMPT_LOGPROB_ROWS),
                )
                layers = kv_layers(config, self.cache)
                return PlannedForward(PlannedModel(program, weights, layers, limits, self.pool, exchange))
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
            sizes, kv_format = (1, 2), KV_FORMATS[config.kv_dtype]
            base = address, cache.block_stride_bytes, scheduler.block_size
            layers.append(_native.KvLayer(*base, *sizes, kv_format, group))
            continue
        if not isinstance(spec, PagedKV):
            raise UnsupportedModelError(
                f"a plan cannot hold {type(spec).__name__} caches: --enforce-eager runs the model op by op"
            )
        layer = _native.KvLayer(
            address, cache.block_stride_bytes, scheduler.block_size, spec.num_kv_heads, spec.head_size,
            KV_FORMATS[config.kv_dtype], group,
        )  # fmt: skip
        layers.append(layer)
    return layers
