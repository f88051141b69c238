"""`StepWork`: FLOPs, bytes and least times of a tour's steps, and the times of their operations; and the tour's model.

Work is what the model's own instructions say, as in `quire explain`; times are those of recorded steps.
Next to read: `quire/insight/explain/phases.py`, `tour.py`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.config import EngineConfig, EngineOptions
from quire.engine.tokenizer_source import has_tokenizer, load_tokenizer
from quire.errors import ConfigError, ModelError, UnsupportedModelError
from quire.insight.explain.device import Device, read_calibration
from quire.insight.explain.phases import Phase
from quire.insight.explain.report import format_value, scaled
from quire.insight.explain.subject import RankModel, has_config_alone, open_subject, trace_rank
from quire.insight.trace import Line
from quire.kernels.instruction import StepShape, Work
from quire.runtime.machine_limits import measure_limits
from quire.runtime.plan.lower import split_name
from quire.runtime.worker import KV_FORMATS
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.model_files import Progress
from quire.weights.sources import resolve_source

PARAMS = SamplingParams(temperature=0, ignore_eos=True, logprobs=5)
"""Of every request of a tour."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Numbers of a step, or of several added up. FLOPs and bytes are those of one rank, 0 if the model has no plan.

    Fields:
        seconds: measured.
        flops: with causal attention; uncausal_flops: with the scores that the mask drops.
        memory_s, compute_s: that reading and arithmetic need at the limits of the machine; floor_s: of both, the longer
            in each step, and of the connection between ranks. No kernel can be faster.
        predicted_s: by the calibrated kernels of this machine; 0 without a calibration.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    flops: int = 0
    uncausal_flops: int = 0
    num_bytes: int = 0
    bytes_sent: int = 0
    memory_s: float = 0.0
    compute_s: float = 0.0
    floor_s: float = 0.0
    predicted_s: float = 0.0

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def tokens_per_s(self) -> float:
        """Computed tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def share_of_limit(self) -> float | None:
        """The least time as a share of the measured one; None if the work is not known."""
        return self.floor_s / self.seconds if self.floor_s else None

    @property
    def speed(self) -> str:
        """Time and tokens per second."""
        return f"{self.num_tokens} tokens in {format_value(self.seconds, 's')} = {self.tokens_per_s:,.4g} tokens/s"

    @property
    def shown(self) -> list[str]:
        """Lines with everything that is known."""
        if self.share_of_limit is None:
            return [self.speed]
        flops, uncausal = scaled(self.flops, "FLOP"), scaled(self.uncausal_flops, "FLOP")
        flops += f" ({uncausal} uncausal)" * (uncausal != flops)
        sent = f", {scaled(self.bytes_sent, 'B')} sent" if self.bytes_sent else ""
        binding = "memory" if self.memory_s >= self.compute_s else "arithmetic"
        needed = f"{binding} alone needs {format_value(self.floor_s, 's')}"
        needed += f", predicted {format_value(self.predicted_s, 's')}" if self.predicted_s else ""
        needed += "; the machine was slower while its limits were measured" * (self.share_of_limit > 1)
        return [
            self.speed,
            f"{flops}, {scaled(self.num_bytes, 'B')} moved{sent}:"
            f" {scaled(self.flops / self.seconds, 'FLOP/s')}, {scaled(self.num_bytes / self.seconds, 'B/s')}",
            f"{self.share_of_limit:.1%} of the limit: {needed}",
        ]

    @property
    def facts(self) -> dict[str, float | None]:
        """All numbers by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**found, "tokens_per_s": self.tokens_per_s, "share_of_limit": self.share_of_limit}


@dataclass(frozen=True, slots=True)
class Operation:
    """Equal instructions of a step, such as those of all layers.

    Fields:
        works: an instruction's parts; weight: its shape and format, "" without one.
        seconds: mean time of an instruction; None if it was not timed.
    """

    count: int
    works: Sequence[Work]
    weight: str
    seconds: float | None


class StepWork:
    """The model of one rank, and the limits of this machine. `rank`: its instructions; `num_ranks`: in all."""

    def __init__(self, config: EngineConfig, rank: RankModel, device: Device, num_ranks: int = 1) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._config, self._device = config, device

    @classmethod
    def measure(cls, config: EngineConfig, checkpoint: Checkpoint) -> "StepWork | None":
        """Trace the model and measure the machine's limits, about a second; None for a model that has no plan."""
        num_ranks = config.options.tensor_parallel_size
        try:
            rank = trace_rank(config, checkpoint, num_ranks)
        except UnsupportedModelError:
            return None
        found = read_calibration(config.hardware) if config.device == "cpu" else None
        kinds = ("int8", "bf16", "fp32") if config.device == "cpu" else ("bf16", "fp16", "fp32")
        limits = measure_limits(config.device, kinds, config.weight_bytes)
        return cls(config, rank, Device(config.hardware, limits, "measured now", None, found), num_ranks)

    @property
    def limits(self) -> str:
        """The limits of the machine, and the meaning of the numbers where there are several ranks."""
        found = self._device.limits
        kinds = set(self.phase(0, 1, 1).flops_by_arithmetic)
        rates = [f"{scaled(rate, 'FLOP/s')} in {name}" for name, rate in found.flops_per_s.items() if name in kinds]
        rank = f"; FLOPs and bytes are those of rank 0 of {self.num_ranks}" if self.num_ranks > 1 else ""
        return f"limits, measured now: {scaled(found.read_bytes_per_s, 'B/s')} of memory, {', '.join(rates)}{rank}"

    def phase(self, start: int, count: int, num_logit_rows: int) -> Phase:
        """Return the work of a step that computes `count` tokens of one request from position `start` on."""
        config = self._config
        step = StepShape(((start, count),), num_logit_rows, KV_FORMATS[config.kv_dtype], config.tile_rows)
        return Phase("", step, config, self.rank, self._device, PARAMS)

    def figures(self, seconds: float, start: int, count: int, num_logit_rows: int) -> Figures:
        """Return the numbers of one such step. The ranks of a CPU share its memory and its cores."""
        phase = self.phase(start, count, num_logit_rows)
        shared = self.num_ranks if self._config.device == "cpu" else 1
        dropped = sum(
            work.uncausal_flops - work.cost.flops for works in phase.works for work in works if work.uncausal_flops
        )
        return Figures(
            count,
            seconds,
            phase.flops,
            phase.flops + dropped,
            phase.num_bytes,
            phase.bytes_sent,
            shared * phase.memory_s,
            shared * phase.compute_s,
            shared * phase.floor_s,
            phase.predicted_s or 0.0,
        )

    def operations(self, steps: Mapping[str, tuple[Phase, Sequence[Line]]]) -> list[dict[str, Operation]]:
        """Return the operations by the names of steps. `steps`: phases, and the timed instructions of each.

        Instructions of equal work in the first step are one operation in all of them.
        """
        first = next(iter(steps.values()))[0]
        alike: dict[object, list[int]] = {}
        for index, works in enumerate(first.works):
            key = tuple((work.name, work.shape, work.cost) for work in works)
            alike.setdefault(key, []).append(index)
        times = {name: _times(phase, ops) for name, (phase, ops) in steps.items()}
        found = []
        for indices in alike.values():
            rows = {}
            for name, (phase, _) in steps.items():
                if indices[0] >= len(phase.instructions):
                    continue  # the head, in a step that samples nothing
                timed = [times[name][index] for index in indices if index in times[name]]
                seconds = math.fsum(timed) / len(timed) if timed else None
                rows[name] = Operation(len(indices), phase.works[indices[0]], _weight(phase, indices[0]), seconds)
            found.append(rows)
        return found


def operation_lines(operations: Sequence[Mapping[str, Operation]]) -> Iterator[str]:
    """Yield the lines of a table of operations: a title with its weight, then a line per step and part."""
    for rows in operations:
        one = next(iter(rows.values()))
        name = " and ".join(dict.fromkeys(work.name for work in one.works))
        yield f"{one.count:3}× {name}{one.weight}"
        for step, row in rows.items():
            for work in row.works:
                part = f"{work.name} " if len(row.works) > 1 else ""
                seconds = row.seconds if work is row.works[-1] else None
                yield f"      {step:8} {part}{', '.join(_numbers(work, row, seconds))}"


def rank_lines(rank: RankModel, num_tokens: int) -> Iterator[str]:
    """Yield each matrix's whole shape and this rank's, the order of products and sums, and the size of the sums.

    `num_tokens`: of a prefill.
    """
    shapes: Counter[tuple[str, tuple[int, ...], tuple[int, ...]]] = Counter()
    for weight in rank.weights:
        if len(weight.shape) == 2:
            shapes[weight.layer_and_role[1].removesuffix(".weight"), weight.whole_shape, weight.shape] += 1
    for (role, whole, mine), count in shapes.items():
        yield f"{count:3}× {role}: {list(whole)} in all, {list(mine)} on rank 0"
    order: list[str] = []
    for item in rank.body:
        weight = item.named_weight
        if item.collective:
            order.append("all-reduce")
        elif weight is not None and len(weight.shape) == 2:
            order.append(split_name(rank.names[id(weight)])[1].removesuffix(".weight"))
        if order.count("all-reduce") > 2:
            break
    yield f"order in the first layer: {', '.join(order)}, …"
    found = [item.collective for item in (*rank.body, *rank.head) if item.collective]
    sums, gathers = [one for one in found if one.is_sum], [one for one in found if not one.is_sum]
    if sums:
        width, value_bytes = sums[0].width, sums[0].value_bytes
        row_bytes = width * value_bytes
        sizes = f"{scaled(num_tokens * row_bytes, 'B')} in the prefill, {scaled(row_bytes, 'B')} in a decode"
        yield f"{len(sums)} all-reduces in a step, each of T · {width} values · {value_bytes} B: {sizes}"
    if gathers:
        yield f"{len(gathers)} all-gather of the logits, {gathers[0].width} values a row"


def _numbers(work: Work, row: Operation, seconds: float | None) -> Iterator[str]:
    cost = work.cost
    if work.shape:
        yield work.shape
    if cost.flops:
        yield scaled(cost.flops, "FLOP")
    if work.uncausal_flops:
        yield f"uncausal {scaled(work.uncausal_flops, 'FLOP')}"
    if cost.num_bytes:
        yield scaled(cost.num_bytes, "B")
    if cost.flops and cost.num_bytes:
        yield f"{cost.flops / cost.num_bytes:.3g} FLOP/B"
    if cost.bytes_sent:
        yield f"{scaled(cost.bytes_sent, 'B')} sent"
    if seconds is not None:
        flops, num_bytes = (sum(getattr(one.cost, name) for one in row.works) for name in ("flops", "num_bytes"))
        rates = [scaled(value / seconds, unit) for value, unit in ((flops, "FLOP/s"), (num_bytes, "B/s")) if value]
        yield f"{'together ' * (len(row.works) > 1)}{format_value(seconds, 's')}{': ' * bool(rates)}{', '.join(rates)}"


def _weight(phase: Phase, index: int) -> str:
    instruction = phase.instructions[index][0]
    weight, packing = instruction.named_weight, getattr(instruction, "packing", None)
    if weight is None:
        return ""
    return f", weight {list(weight.shape)}{f' {packing.name}' if packing else ''}"


def _times(phase: Phase, ops: Sequence[Line]) -> dict[int, float]:
    """Return the seconds of each timed instruction by its index. An instruction that ran is timed in its order."""
    found: dict[int, float] = {}
    at = 0
    for index, (instruction, step) in enumerate(phase.instructions):
        if at < len(ops) and ops[at]["name"] == instruction.describe(step.num_tokens):
            found[index] = ops[at]["microseconds"] / 1e6
            at += 1
    return found


# --- Model and tokenizer: any model that `explain` takes, with random weights where it has none ---

LENDER = EngineOptions.model
"""The model whose tokenizer is borrowed."""
LAYER_COUNTS = ("num_hidden_layers", "n_layer")


def open_model(
    options: EngineOptions, num_layers: int | None, progress: Progress | None = None
) -> tuple[EngineOptions, Checkpoint]:
    """Return the options and the checkpoint of a tour. `num_layers`: keep the first ones only; None: all.

    Weights are random, and `tensors` empty, where the model has none or is cut. Raises: ModelError, ConfigError.
    """
    if options.load_format != "dummy" and num_layers is None and not has_config_alone(options.model):
        return options, open_checkpoint(resolve_source(options.model, revision=options.revision, progress=progress))
    checkpoint = open_subject(options.model, progress)
    config = checkpoint.hf_config if num_layers is None else cut_layers(checkpoint.hf_config, num_layers)
    return replace(options, load_format="dummy"), replace(checkpoint, hf_config=config, tensors={})


def cut_layers(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a model's config with its first layers only; every list with an entry per layer is cut too.

    Raises: ConfigError if there are fewer layers.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": cut_layers(text, num_layers)}
    name = next((name for name in LAYER_COUNTS if isinstance(config.get(name), int)), None)
    if name is None:
        raise ConfigError(f"--num-layers needs a config.json that has {' or '.join(LAYER_COUNTS)}: leave it out")
    count = config[name]
    if num_layers > count:
        raise ConfigError(f"--num-layers {num_layers} exceeds the {count} layers of the model: leave it out")
    cut = {
        key: value[:num_layers] if isinstance(value, list) and len(value) == count > 1 else value
        for key, value in config.items()
    }
    return {**cut, name: num_layers}


def open_tokenizer(
    options: EngineOptions, checkpoint: Checkpoint, vocab_size: int, progress: Progress | None = None
) -> tuple[Tokenizer, bool]:
    """Return the tokenizer that the options name or the model has, else that of `LENDER`, and whether it is borrowed.

    Raises: ConfigError, ModelError.
    """
    path, source = checkpoint.files.path, options.tokenizer
    if source is None and path.is_file() and path.suffix == ".json":
        source = str(path.parent)  # the tokenizer beside a config.json
    if options.tokenizer is not None or has_tokenizer(checkpoint):
        return load_tokenizer(checkpoint, source, vocab_size), False
    try:
        lender = open_checkpoint(resolve_source(LENDER, progress=progress), with_tensors=False)
    except ModelError as error:
        raise type(error)(
            f"{options.model} has no tokenizer, and that of {LENDER} cannot be had: --tokenizer DIR names one. {error}"
        ) from error
    return load_tokenizer(lender), True
