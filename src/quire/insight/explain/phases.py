"""`Phase`: the work of one step, added up from the instructions of a rank, and the time that a device needs for it.

    floor = max(bytes / read bandwidth, Σ over arithmetics of FLOPs / rate) + bytes sent / link     (Williams 2009)

Next to read: `device.py`.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from quire.config import EngineConfig
from quire.errors import UnsupportedModelError
from quire.insight.explain.device import Device, arithmetic_of, interpolate
from quire.insight.explain.report import Quantity, Section, format_value
from quire.insight.explain.subject import RankModel, trace_rank
from quire.kernels.instruction import Cost, Emitter, Instruction, StepShape, Work
from quire.runtime.machine_limits import MachineLimits, measure_limits
from quire.runtime.ranks import KEY_BYTES, max_best
from quire.runtime.worker import KV_FORMATS
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Op:
    """`count` equal operations of a step. `shape`: m×k×n of a product; `uncausal_flops`: with the masked scores."""

    name: str
    count: int
    shape: str
    cost: Cost
    formula: str
    uncausal_flops: int = 0


@dataclass(eq=False, frozen=True, slots=True)
class MergeBest(Instruction):
    """Exchange of the `num_best` best logits of each row, which ranks of a plan do in place of an `AllGather`."""

    num_best: int

    def emit(self, to: Emitter) -> None:
        """See `Instruction`."""
        raise NotImplementedError("ranks merge outside of the plan: runtime/ranks.py")

    def cost(self, step: StepShape) -> Cost:
        """See `Instruction`."""
        return Cost(bytes_sent=KEY_BYTES * self.num_best * step.num_tokens)

    def explain(self, step: StepShape) -> list[Work]:
        """See `Instruction`."""
        formula = f"{step.num_tokens} rows · {self.num_best} logits · {KEY_BYTES} B of logit and token"
        return [Work("MergeBest of logits", self.cost(step), formula)]


@dataclass(frozen=True)
class Phase:
    """A step of one rank on a device. `params`: of the requests, which decide what ranks send of the logits."""

    name: str
    step: StepShape
    config: EngineConfig
    rank: RankModel
    device: Device
    params: SamplingParams = field(default_factory=SamplingParams)

    @cached_property
    def instructions(self) -> list[tuple[Instruction, StepShape]]:
        """Each instruction with the step as it sees it; a step without rows of logits has no head."""
        if not self.step.num_logit_rows:
            return [(item, self.step) for item in self.rank.body]
        head = self.step.of_logit_rows()
        *before, last = self.rank.head
        gather = last.collective
        if gather and not gather.is_sum and not gather.is_ring and self.params.takes_logits_as_they_are:
            num_best = self.params.num_best(self.config.model.vocab_size)
            if 0 < num_best <= max_best(gather.share.width):
                last = MergeBest(num_best)
        return [(item, self.step) for item in self.rank.body] + [(item, head) for item in (*before, last)]

    @cached_property
    def costs(self) -> list[tuple[Instruction, Cost]]:
        """Each instruction with its cost."""
        return [(instruction, instruction.cost(step)) for instruction, step in self.instructions]

    @property
    def flops(self) -> int:
        """FLOPs of the step, attention causal."""
        return sum(cost.flops for _, cost in self.costs)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and KV cache that the step reads and writes."""
        return sum(cost.num_bytes for _, cost in self.costs)

    @property
    def bytes_sent(self) -> int:
        """Bytes that the rank sends."""
        return sum(cost.bytes_sent for _, cost in self.costs)

    @cached_property
    def flops_by_arithmetic(self) -> dict[str, int]:
        """FLOPs by the arithmetic that they run in on this device."""
        found: dict[str, int] = {}
        for instruction, cost in self.costs:
            if cost.flops:
                name = arithmetic_of(instruction, cost.arithmetic, self.config)
                found[name] = found.get(name, 0) + cost.flops
        return found

    @cached_property
    def read_rate(self) -> float:
        """Bytes per second that this device reads, from a cache if one holds the weights and keys of the step."""
        found = self.device.calibration
        return interpolate(found.read, self.num_bytes) if found else self.device.limits.read_bytes_per_s

    def rate(self, arithmetic: str) -> float:
        """FLOPs per second of this device in an arithmetic."""
        rates = self.device.limits.flops_per_s
        return rates.get(arithmetic, rates["fp32"])

    @cached_property
    def layer_score_flops(self) -> int:
        """FLOPs of QKᵀ in the layer with the most, masked scores included."""
        attention = [item for item, _ in self.instructions if item.is_attention]
        return max((work.uncausal_flops for item in attention for work in item.explain(self.step)), default=0)

    @property
    def memory_s(self) -> float:
        """Seconds that memory needs."""
        return self.num_bytes / self.read_rate

    @property
    def compute_s(self) -> float:
        """Seconds that arithmetic needs."""
        return sum(flops / self.rate(name) for name, flops in self.flops_by_arithmetic.items())

    @property
    def link_s(self) -> float:
        """Seconds that the connection to other ranks needs; 0 where its speed is not known."""
        return self.bytes_sent / self.device.link_bytes_per_s if self.device.link_bytes_per_s else 0.0

    @property
    def floor_s(self) -> float:
        """Seconds that no kernel can be faster than."""
        return max(self.memory_s, self.compute_s) + self.link_s

    @cached_property
    def predicted_s(self) -> float | None:
        """Seconds by the machine's calibrated kernels; None without a calibration, and for several ranks."""
        found = self.device.calibration
        if found is None or self.bytes_sent or not self.config.uses_plan:
            return None
        ops = sum(found.seconds(instruction, step, self.num_bytes) for instruction, step in self.instructions)
        return ops + found.host[0] + found.host[1] * len(self.step.requests)

    def ops(self) -> list[Op]:
        """Return the operations in order; equal ones, as of equal layers, are one with a count."""
        found: dict[tuple[object, ...], Op] = {}
        for works in self.works:
            for work in works:
                key = (work.name, work.shape, work.cost)
                count = found[key].count + 1 if key in found else 1
                uncausal = f" = {format_value(work.uncausal_flops, 'FLOP')}" if work.uncausal_flops else ""
                found[key] = Op(work.name, count, work.shape, work.cost, work.formula + uncausal, work.uncausal_flops)
        return list(found.values())

    @cached_property
    def works(self) -> list[list[Work]]:
        """Per instruction its rows of `ops`, with their names."""
        found = []
        before = "the embedding"
        for instruction, step in self.instructions:
            weight, is_head = instruction.named_weight, step is not self.step and instruction.product is not None
            role = "" if weight is None else self.rank.role_of(weight)
            named = []
            for work in instruction.explain(step):
                name = "head " * is_head + work.name.format(role=role, before=before)
                named.append(replace(work, name=name))
                before = name if work.shape else before
            found.append(named)
        return found


def measured_floors(
    config: EngineConfig, checkpoint: Checkpoint, steps: Sequence[tuple[tuple[int, int], ...]]
) -> tuple[MachineLimits, list[float]]:
    """Return this device's limits, measured now, and the seconds that each step takes at least by them.

    `steps`: requests as in `StepShape`; each needs one row of logits. A model that cannot be traced has no floors.
    """
    phases = []
    unmeasured = Device(config.hardware, MachineLimits(0.0, {}), "not measured")
    with contextlib.suppress(UnsupportedModelError):
        rank = trace_rank(config, checkpoint, 1)
        for requests in steps:
            step = StepShape(requests, len(requests), KV_FORMATS[config.kv_dtype], config.tile_rows)
            phases.append(Phase("", step, config, rank, unmeasured))
    kinds = {"fp32"}.union(*(phase.flops_by_arithmetic for phase in phases))
    limits = measure_limits(config.device, kinds, config.weight_bytes)
    device = replace(unmeasured, limits=limits)
    return limits, [replace(phase, device=device).floor_s for phase in phases]


def phase_section(phase: Phase, *, with_ops: bool) -> Section:
    """Return the quantities of one phase, and with `with_ops` the table of its operations."""
    section = Section(phase.name[0].upper() + phase.name[1:])
    ops = phase.ops()
    uncausal = sum(op.count * (op.uncausal_flops - op.cost.flops) for op in ops if op.uncausal_flops)
    attention = sum(cost.flops for item, cost in phase.costs if item.is_attention)
    kv_read = sum(item.cache_bytes_read(step) for item, step in phase.instructions)
    written = sum(cost.bytes_written for _, cost in phase.costs)
    weights = phase.num_bytes - kv_read - written
    shown = {
        name: format_value(value, "FLOP")
        for name, value in (("products and norms", phase.flops - attention), ("causal attention", attention))
    }
    parts = " + ".join(f"{name} {value}" for name, value in shown.items())
    by_rate = " + ".join(
        f"{format_value(flops, 'FLOP')} / {format_value(phase.rate(name), 'FLOP/s')} in {name}"
        for name, flops in phase.flops_by_arithmetic.items()
    )
    binding = "memory" if phase.memory_s >= phase.compute_s else "compute"
    section.quantities = [
        Quantity("FLOPs", phase.flops, "FLOP", "Σ of all operations", parts),
        Quantity("FLOPs, uncausal", phase.flops + uncausal, "FLOP", "with the scores that the mask drops"),
        Quantity(
            "bytes moved", phase.num_bytes, "B", "weights + KV read + KV written", f"{weights} + {kv_read} + {written}"
        ),
        Quantity("intensity", phase.flops / max(phase.num_bytes, 1), "FLOP/B", "FLOPs / bytes", f"{binding} binds"),
        Quantity(
            "memory time",
            phase.memory_s,
            "s",
            "bytes / bandwidth",
            f"{phase.num_bytes} / {format_value(phase.read_rate, 'B/s')}",
        ),
        Quantity("compute time", phase.compute_s, "s", "Σ FLOPs / rate", by_rate),
        *_collectives(phase),
        Quantity(
            "floor", phase.floor_s, "s", f"max(memory, compute){' + link' if phase.link_s else ''}", f"{binding} binds"
        ),
    ]
    section.quantities += _scores(phase)
    if phase.predicted_s is not None:
        formula = "Σ of the operations at calibrated rates + host"
        section.quantities.append(Quantity("predicted", phase.predicted_s, "s", formula))
    if with_ops:
        section.header = ("operation", "count", "m×k×n", "FLOPs", "bytes", "all FLOPs", "all bytes", "formula")
        section.units = ("text", "count", "text", "FLOP", "B", "FLOP", "B", "text")
        section.rows = [
            (
                op.name,
                op.count,
                op.shape,
                op.cost.flops,
                op.cost.num_bytes or op.cost.bytes_sent,
                op.count * op.cost.flops,
                op.count * (op.cost.num_bytes or op.cost.bytes_sent),
                op.formula,
            )
            for op in ops
        ]
    return section


def _scores(phase: Phase) -> Sequence[Quantity]:
    """Return the work of one layer's scores, of a step with a prompt."""
    if all(count == 1 for _, count in phase.step.requests):
        return ()
    formula = "uncausal: 2 · query width · tokens · positions"
    return (Quantity("QKᵀ of a layer", phase.layer_score_flops, "FLOP", formula),)


def _collectives(phase: Phase) -> Sequence[Quantity]:
    """Return the size of one all-reduce, their number in a layer, and what the rank sends in the step."""
    items = [item for item, _ in phase.instructions]
    sums = [item.collective for item in items if item.collective and item.collective.is_sum]
    if not sums:
        return ()
    one, num_layers = sums[-1], phase.config.model.num_layers
    of_embeddings = sum(before.is_lookup and bool(item.collective) for before, item in pairwise(items))
    last, step_of_last = phase.instructions[-1]
    formula = "Σ 2 (N - 1) / N · all-reduce + (N - 1) / N · logits" if one.is_ring else "Σ all-reduce + logits / N"
    if isinstance(last, MergeBest):
        formula = f"Σ all-reduce + {step_of_last.num_tokens} · {last.num_best} best logits · {KEY_BYTES}"
    found = [
        Quantity(
            "all-reduce",
            one.num_bytes(phase.step),
            "B",
            "tokens · width · bytes",
            f"{phase.step.num_tokens} · {one.width} · {one.value_bytes}",
        ),
        Quantity(
            "all-reduces per layer",
            (len(sums) - of_embeddings) / num_layers,
            "",
            "(all-reduces - the embedding's) / layers",
            f"({len(sums)} - {of_embeddings}) / {num_layers}",
        ),
        Quantity("sent per rank", phase.bytes_sent, "B", formula, f"N = {one.num_ranks}"),
    ]
    if phase.link_s:
        found.append(Quantity("link time", phase.link_s, "s", "sent / link"))
    return found
