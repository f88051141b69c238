"""`RankModel`: what one rank of a tensor-parallel group holds and computes, from the model's own code.

The model is built without values, with a group that records its collectives, traced, and lowered to the
instructions of its plan. Their `cost` is the only source of FLOPs and bytes here.
Next to read: `explanation.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from quire.cache_spec import CacheSpec, PagedKV
from quire.config import DTYPES, EngineConfig, ModelConfig
from quire.errors import UnsupportedModelError
from quire.kernels.collective import RecordingGroup
from quire.kernels.instruction import Instruction, Packing
from quire.kernels.tracing import NotTraceableError
from quire.layers.group import SINGLE, Group, LocalGroup, Partition, share_heads
from quire.lazy_torch import on_meta
from quire.runtime.loader import make_share
from quire.runtime.plan.emit import place_buffers
from quire.runtime.plan.load import trace_share
from quire.runtime.plan.lower import split_name
from quire.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class RankWeight:
    """A parameter: its whole shape, the share of this rank, and the share's bytes in memory."""

    name: str
    whole_shape: tuple[int, ...]
    shape: tuple[int, ...]
    format: str
    num_bytes: int

    @property
    def num_values(self) -> int:
        """Values of the whole parameter."""
        return math.prod(self.whole_shape)

    @property
    def layer_and_role(self) -> tuple[int | None, str]:
        """ "layers.3.mlp.down_proj.weight" → 3, "mlp.down_proj.weight"."""
        return split_name(self.name)


@dataclass(frozen=True, slots=True)
class RankModel:
    """Parameters, instructions and cache of one rank.

    Fields:
        names: of the parameters, by identity: an instruction's weight is one.
        body, head: instructions; the rows of the head are those that need logits.
        cache_specs: per layer, of this rank's heads.
        buffer_row_bytes: bytes of the plan's buffers per token of a step.
    """

    weights: tuple[RankWeight, ...]
    names: dict[int, str]
    body: Sequence[Instruction]
    head: Sequence[Instruction]
    cache_specs: tuple[CacheSpec, ...]
    buffer_row_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters of this rank."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def num_parameters(self) -> int:
        """Parameters of this rank."""
        return sum(math.prod(weight.shape) for weight in self.weights)

    def role_of(self, parameter: object) -> str:
        """Return the role of an instruction's weight in its layer, as in "mlp.down_proj"."""
        return split_name(self.names[id(parameter)])[1].removesuffix(".weight")

    def share_of(self, model: ModelConfig, *, is_stored: bool, tp: int) -> ModelConfig:
        """Return the model's facts as the memory plan of one rank needs them."""
        if tp == 1:
            return model
        names = [
            name
            for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner")
            if model.hf_config.get(name)
        ]
        shares = {name: model.hf_config[name] // tp for name in names}
        return replace(
            model,
            num_parameters=self.num_parameters,
            cache_specs=self.cache_specs,
            num_heads=model.num_heads // tp,
            num_kv_heads=max(1, model.num_kv_heads // tp),
            hf_config={**model.hf_config, **shares},
            stored_bytes=self.weight_bytes if is_stored else None,
        )


def trace_rank(config: EngineConfig, checkpoint: Checkpoint, tp: int) -> RankModel:
    """Trace rank 0 of `tp` ranks. `config`: resolved for the whole model.

    Raises: ConfigError if `tp` does not divide the model; UnsupportedModelError for a model that cannot be traced.
    """
    model_config = config.model
    ring_bytes = None if config.uses_plan else DTYPES[config.dtype]
    group: Group = SINGLE if tp == 1 else RecordingGroup(0, tp, model_config.vocab_size, ring_bytes)
    with on_meta():
        share = make_share(config, checkpoint, group)
    try:
        program, packed = trace_share(config, share, config.scheduler.layer_groups)
    except NotTraceableError as error:
        raise UnsupportedModelError(
            f"{model_config.architecture} cannot be explained: its code cannot be traced, because of {error}"
        ) from error
    weights = tuple(
        weigh(
            name, share.partitions.get(name, Partition()).whole_shape(shape), shape, packed.packings.get(name), config
        )
        for name, shape in packed.shapes.items()
    )
    names = {id(parameter): name for name, parameter in share.parameters.items()}
    specs = tuple(_rank_spec(spec, model_config, group) for spec in model_config.cache_specs)
    buffers = place_buffers(program.body, program.hidden)
    return RankModel(weights, names, program.body, program.head, specs, sum(buffers.row_bytes))


def weigh(
    name: str, whole: tuple[int, ...], shape: tuple[int, ...], found: Packing | None, config: EngineConfig
) -> RankWeight:
    """Return a parameter with its bytes: packed for a plan, which keeps vectors in fp32; else in the compute dtype."""
    if found is not None and config.uses_plan:
        return RankWeight(name, whole, shape, found.name, found.num_bytes(shape[1]))
    value_bytes = 4 if config.uses_plan else DTYPES[config.dtype]
    stored = "f32" if config.uses_plan else config.dtype
    return RankWeight(name, whole, shape, stored, value_bytes * math.prod(shape))


def _rank_spec(spec: CacheSpec, model: ModelConfig, group: Group) -> CacheSpec:
    if not isinstance(spec, PagedKV):
        return spec
    _, kv_heads = share_heads(model.num_heads, spec.num_kv_heads, group)
    return msgspec.structs.replace(spec, num_kv_heads=kv_heads.size)


def rank_partitions(config: EngineConfig, checkpoint: Checkpoint, tp: int) -> list[Mapping[str, Partition]]:
    """Return per rank of `tp` ranks the rows and columns that it holds of each parameter that is cut."""
    with on_meta():
        return [make_share(config, checkpoint, LocalGroup(rank, tp)).partitions for rank in range(tp)]
