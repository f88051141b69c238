"""`Device`: limits of this machine, measured, or of a known accelerator by its data sheet, and the time they allow.

`Calibration`, which `quire doctor --calibrate` measures and keeps, has the achieved rates of each kind of instruction:
with it a step's time is predicted, beside the floor that no kernel can be faster than. Next to read: `measure.py`.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from quire import _native
from quire.config import EngineConfig, Hardware
from quire.errors import ConfigError, nearest
from quire.files import find_own
from quire.kernels.instruction import Instruction, StepShape
from quire.runtime.hardware import detect_hardware
from quire.runtime.machine_limits import MachineLimits, measure_limits, read_rate
from quire.weights.model_cache import cache_directory

CACHED_BYTES = 4 << 20
"""A working set that a cache holds."""
OP_BY_OP = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Arithmetic of products where PyTorch computes them."""
PositiveRate = Annotated[float, msgspec.Meta(gt=0)]
Curve = Sequence[tuple[int, float]]
"""(at, value), ascending."""


class Calibration(msgspec.Struct, frozen=True):
    """Achieved rates of generic kernels on this machine.

    Fields:
        read: working set in bytes → bytes per second that all threads read.
        products: weight format → rows → seconds per FLOP, with weights of `weight_bytes` in all.
        attention: KV format → seconds per byte and per FLOP of decodes, seconds per FLOP of prompts.
        others: instruction → seconds per op and per unit of work (FLOPs and bytes).
        host: seconds per step, and per request of it, that scheduling and sampling take.
    """

    hardware: str
    num_threads: int
    isa: str
    limits: dict[str, float]
    weight_bytes: int
    read: list[tuple[int, float]]
    products: dict[str, list[tuple[int, float]]]
    attention: dict[str, tuple[float, float, float]]
    others: dict[str, tuple[float, float]]
    host: tuple[float, float]

    def seconds(self, instruction: Instruction, step: StepShape, working_set: int) -> float:
        """Predict the time of one instruction. `working_set`: bytes that a whole step moves.

        A product takes the longer of its time at this number of rows and of the time to read its weights, which
        depends on the level of cache that holds the working set.
        """
        cost, product = instruction.cost(step), instruction.product
        if product is not None:
            num_read = max(1.0, product.num_read(step.num_tokens))
            rows = round(step.num_tokens * product.num_active / num_read)
            slower = interpolate(self.read, self.weight_bytes) / interpolate(self.read, working_set)
            seconds = 0.0
            for count, weight_format in product.packing.parts:
                part = count / int(product.weight.shape[0])
                curve = self.products.get(weight_format.name) or self.products["f32"]
                one_row = 2 * part * int(product.weight.numel()) * num_read / product.num_experts * curve[0][1]
                seconds += max(part * cost.flops * interpolate(curve, rows), one_row * max(1.0, slower))
            return seconds
        if instruction.is_attention:
            decodes = StepShape(tuple(item for item in step.requests if item[1] == 1), 0, step.kv_format)
            of_decodes = instruction.cost(decodes)
            per_byte, per_flop, per_prompt_flop = self.attention.get(step.kv_format.name) or self.attention["bf16"]
            time = of_decodes.bytes_read * per_byte + of_decodes.flops * per_flop
            return time + (cost.flops - of_decodes.flops) * per_prompt_flop
        per_op, per_work = self.others.get(type(instruction).__name__) or self.others["Norm"]
        return per_op + per_work * (cost.flops + cost.num_bytes)


def interpolate(curve: Curve, at: int) -> float:
    """Return the value between two points of a curve, or of the nearest end."""
    index = bisect.bisect([point for point, _ in curve], at)
    if index in (0, len(curve)):
        return curve[min(index, len(curve) - 1)][1]
    (left, low), (right, high) = curve[index - 1], curve[index]
    return low + (high - low) * (at - left) / (right - left)


@dataclass(frozen=True, slots=True)
class Device:
    """A device, its limits and their source.

    Fields:
        link_bytes_per_s: one direction, to other ranks.
        cache_bytes_per_s: of CACHED_BYTES that are read again and again; None where it was not measured.
    """

    hardware: Hardware
    limits: MachineLimits
    source: str
    link_bytes_per_s: float | None = None
    calibration: Calibration | None = None
    cache_bytes_per_s: float | None = None

    @property
    def name(self) -> str:
        """The name to show."""
        return self.hardware.name or self.hardware.device


class DataSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device as its vendor states it, in `devices.json` or in a user's file.

    Fields:
        kind: "cuda", or "cpu" for a processor, whose products run in the arithmetic of each weight format.
        flops_per_s: peak rates by arithmetic, dense, without sparsity; "fp32" is one of them.
        link_bytes_per_s: to other devices, one direction.
        source: of these figures.
    """

    name: str
    memory_bytes: Annotated[int, msgspec.Meta(gt=0)]
    read_bytes_per_s: PositiveRate
    flops_per_s: dict[Literal["fp32", "bf16", "fp16", "int8"], PositiveRate]
    kind: Literal["cuda", "cpu"] = "cuda"
    link_bytes_per_s: PositiveRate | None = None
    source: str = "the vendor's data sheet"

    def device(self) -> Device:
        """Return the device that has these limits."""
        has_bf16 = "bf16" in self.flops_per_s
        place = "cuda:0" if self.kind == "cuda" else "cpu"
        hardware = Hardware(place, self.memory_bytes, self.memory_bytes, has_bf16, 1, self.name)
        limits = MachineLimits(self.read_bytes_per_s, self.flops_per_s)  # type: ignore[arg-type]
        return Device(hardware, limits, self.source, self.link_bytes_per_s)


DATA_SHEETS = {
    sheet.name: sheet
    for sheet in msgspec.json.decode((Path(__file__).parent / "devices.json").read_bytes(), type=list[DataSheet])
}
EXAMPLE_SHEET = (
    '{"name": "my GPU", "memory_bytes": 24000000000, "read_bytes_per_s": 1e12, '
    '"flops_per_s": {"bf16": 150e12, "fp32": 80e12}}'
)


def read_data_sheet(path: Path) -> DataSheet:
    """Read a data sheet from a JSON file. Raises: ConfigError."""
    try:
        sheet = msgspec.json.decode(path.read_bytes(), type=DataSheet)
    except OSError as error:
        raise ConfigError(f"--device {path} cannot be read: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--device {path} is no data sheet: {error}; one is {EXAMPLE_SHEET}") from None
    if "fp32" not in sheet.flops_per_s:
        raise ConfigError(f"--device {path} has no rate of fp32 in flops_per_s: norms and softmax run in it")
    return sheet


def find_device(name: str) -> Device:
    """Return a device of `DATA_SHEETS`, of a JSON file, or this machine's: "auto", "cpu", "cuda", "cuda:N".

    Raises: ConfigError for another name, and for a file that is no data sheet.
    """
    names = {known.lower(): known for known in DATA_SHEETS}
    if name.lower() in names:
        return DATA_SHEETS[names[name.lower()]].device()
    if name.endswith(".json"):
        return read_data_sheet(Path(name).expanduser()).device()
    if name.split(":")[0] not in ("auto", "cpu", "cuda"):
        known_names = ["cpu", "cuda", *DATA_SHEETS]
        raise ConfigError(
            f"device {name!r} is not known{nearest(name.lower(), names)}; known are {', '.join(known_names)}, "
            f"or a JSON file such as {EXAMPLE_SHEET}"
        )
    hardware = detect_hardware(name)
    if hardware.device != "cpu":
        limits = measure_limits(hardware.device, ("bf16", "fp16", "fp32"))
        return Device(hardware, limits, "measured now")
    found = read_calibration(hardware)
    if found is None:
        limits = measure_limits("cpu", ("int8", "bf16", "fp32"))
        return Device(hardware, limits, "measured now", cache_bytes_per_s=read_rate(CACHED_BYTES))
    source = f"measured by `quire doctor --calibrate` ({found.num_threads} threads, {found.isa})"
    limits = MachineLimits(found.read[-1][1], found.limits)
    return Device(hardware, limits, source, None, found, interpolate(found.read, CACHED_BYTES))


def arithmetic_of(instruction: Instruction, arithmetic: str, config: EngineConfig) -> str:
    """Return the arithmetic that an instruction runs in: op by op, all products are in the compute dtype."""
    is_product = instruction.product is not None or instruction.is_attention
    return arithmetic if config.uses_plan or not is_product else OP_BY_OP[config.dtype]


def calibration_path() -> Path:
    """Return the file of the calibration, in Quire's cache directory."""
    return cache_directory() / "calibration.json"


def read_calibration(hardware: Hardware) -> Calibration | None:
    """Return the calibration, if there is one of this processor, number of threads and instruction set."""
    try:
        found = msgspec.json.decode(find_own(calibration_path()) or b"", type=Calibration)
    except msgspec.MsgspecError:
        return None
    here = (hardware.name, hardware.num_threads, _native.isa())
    return found if (found.hardware, found.num_threads, found.isa) == here else None
