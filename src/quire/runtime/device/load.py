"""`load_device_plan`: a checkpoint to a device plan and the cache it works on.

Next to read: `plan.py`.
"""

import torch

from quire.cache_spec import PagedKV
from quire.config import EngineConfig
from quire.kernels.tracing import NotTraceableError
from quire.lazy_torch import on_meta
from quire.memory_plan import PROMPT_LOGPROB_ROWS
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.device.memory import StepMemory
from quire.runtime.device.ops import KvView
from quire.runtime.device.plan import DevicePacking, DevicePlan, Kernels, step_size
from quire.runtime.eager import fill_tensors
from quire.runtime.loader import ModelShare, make_share
from quire.runtime.plan.lower import Program, lower
from quire.runtime.plan.packed_weights import BY_DTYPE
from quire.runtime.plan.trace import trace_model
from quire.weights.checkpoint import Checkpoint
from quire.weights.model_files import Progress, ignore_progress

MAX_HOST_RANDOM = 1 << 25
"""Parameters that the host makes at random; more of them would take it seconds."""


def load_device_plan(
    config: EngineConfig, checkpoint: Checkpoint, cache: CacheEngine, progress: Progress | None = None
) -> DevicePlan:
    """Trace the model for a device and read its weights.

    Raises: NotTraceableError before any weight is read, for models that must run op by op; as `make_share`.
    """
    device, dtype, scheduler = torch.device(config.device), getattr(torch, config.dtype), config.scheduler
    with on_meta():
        share = make_share(config, checkpoint)
    program = trace_for_device(config, share)
    layers = device_kv_layers(config, cache)
    max_logit_rows = max(scheduler.max_num_seqs, PROMPT_LOGPROB_ROWS)
    step = StepMemory(scheduler, step_size(scheduler.max_num_batched_tokens), step_size(max_logit_rows), device)
    weights = _Weights(share, dtype, device)
    plan = DevicePlan(program, weights.by_id, layers, step, dtype, choose_kernels(config, step))
    weights.fill(config, progress or ignore_progress)
    return plan


def trace_for_device(config: EngineConfig, share: ModelShare) -> Program:
    """Trace a model whose products read rows of the compute type. Raises: NotTraceableError."""
    traced = trace_model(share.model, config.scheduler.layer_groups)
    whole = BY_DTYPE[config.dtype]
    packings = {
        id(parameter): DevicePacking(((parameter.shape[0], whole),))
        for parameter in share.parameters.values()
        if parameter.ndim == 2
    }
    return lower(traced, lambda parameter: packings[id(parameter)])


def device_kv_layers(config: EngineConfig, cache: CacheEngine) -> list[KvView]:
    """Each layer's share of the KV pool. In a block the tokens of a head are contiguous: [2, K, B, D].

    Raises: NotTraceableError for a kind of cache that no op of a device reads.
    """
    groups, views = config.scheduler.kv_cache_groups, list[KvView]()
    for values, group_index in zip(cache.kv_caches, cache.layer_groups, strict=True):
        spec = groups[group_index].spec
        if isinstance(spec, PagedKV):
            num_blocks, planes, block_size, num_heads, size = values.shape
            values = values.view(num_blocks, planes, num_heads, block_size, size).transpose(2, 3)
        elif spec.is_state:
            if config.gpu_kernels != "triton":
                raise NotTraceableError(f"a cache of {type(spec).__name__} on a device without Triton")
            values = values.view(torch.float32)
        views.append(KvView(values, group_index))
    return views


def choose_kernels(config: EngineConfig, step: StepMemory) -> Kernels | None:
    """Return what computes ops in the places of their references."""
    if config.gpu_kernels != "triton":
        return None
    from quire.runtime.device.triton_ops import TritonOps

    return TritonOps(step, has_drafts=config.speculative != "off")


class _Weights:
    """A model's parameters on a device: matrices in the compute type, vectors in fp32."""

    def __init__(self, share: ModelShare, dtype: torch.dtype, device: torch.device) -> None:
        self._share = share
        self._by_name = {
            name: torch.zeros(
                tuple(parameter.shape), dtype=dtype if parameter.ndim == 2 else torch.float32, device=device
            )
            for name, parameter in share.parameters.items()
        }
        self.by_id = {id(parameter): self._by_name[name] for name, parameter in share.parameters.items()}

    def fill(self, config: EngineConfig, progress: Progress) -> None:
        """Read the stored tensors, or make random ones."""
        if config.options.load_format == "dummy" and sum(map(torch.numel, self._by_name.values())) > MAX_HOST_RANDOM:
            self._make_random(config.options.seed)
        else:
            fill_tensors(config, self._share, self._by_name, progress)

    def _make_random(self, seed: int) -> None:
        """Fill all parameters by the device, with other values than a CPU makes."""
        torch.manual_seed(seed)
        for name, parameter in self._by_name.items():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
