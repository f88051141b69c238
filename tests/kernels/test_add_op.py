"""A new op is one header in `native/ops/` and one module in `kernels/`: nothing else names it.

`Double` and `Project` follow the recipe of CONTRIBUTING.md from outside the package, on native ops that there are.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quire._native import RowType
from quire.insight.explain.device import Calibration, Device
from quire.insight.explain.phases import Phase, phase_section
from quire.insight.explain.subject import RankModel
from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, Packing, Product, StepShape
from quire.kernels.lowering import LOWERS, Lowering, lowers
from quire.kernels.registry import KERNELS, kernel
from quire.kernels.tracing import SIZES, Call, same_sizes
from quire.layers.embedding import Embedding
from quire.nn import named_parameters
from quire.runtime.eager import give_memory
from quire.runtime.machine_limits import MachineLimits
from quire.runtime.plan.emit import BODY
from tests.runtime.builders import make_config
from tests.runtime.plan.graphs import Format, planned, run_prompt

ROOT = Path(__file__).parents[2]
IDS, WIDTH = [3, 1, 18], 32


@dataclass(eq=False, frozen=True, slots=True)
class Double(Instruction):
    """out = 2 · x, by the native op `scale`."""

    x: Columns
    out: Buffer

    def emit(self, to: Emitter) -> None:
        to.push("scale", x=self.x, out=self.out, width=self.out.width, factor=2.0)

    def cost(self, step: StepShape) -> Cost:
        return Cost(step.num_tokens * self.out.width)


@dataclass(eq=False, frozen=True, slots=True)
class Project(Instruction):
    """out = x @ weight.T, by the native op `gemm`."""

    weight: Any
    packing: Packing
    x: Columns
    out: Buffer

    def emit(self, to: Emitter) -> None:
        to.push("gemm", weight=self.weight, x=self.x, out=self.out)

    def cost(self, step: StepShape) -> Cost:
        return self.product.cost(step, None)

    @property
    def product(self) -> Product:
        return Product(self.weight, self.packing)


@pytest.fixture
def operations() -> Iterator[SimpleNamespace]:
    """Register kernels, the sizes of their results and their lowering, as the import of an op's module does."""

    @kernel
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @kernel.with_traits(weight="weight")
    def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.T

    SIZES.update(double=same_sizes, project=lambda x, weight: (weight.shape[0],))

    @lowers("double")
    def lower(to: Lowering, call: Call) -> None:
        (x,) = call.arguments
        to.append(Double(to.columns(x), to.result(call, takes_type=True)))

    @lowers("project")
    def lower_product(to: Lowering, call: Call) -> None:
        x, weight = call.arguments
        packing = to.packing_of(weight)
        to.append(Project(weight, packing, to.typed(x, packing.rows), to.result(call)))

    yield SimpleNamespace(double=double, project=project)
    for name in ("double", "project"):
        del KERNELS[name], SIZES[name], LOWERS[name]


@pytest.fixture
def model(operations: SimpleNamespace) -> Any:
    class Model(nn.Module):
        num_layers = 1

        def __init__(self) -> None:
            super().__init__()
            self.table = Embedding(19, WIDTH)
            self.up = nn.Parameter(torch.empty(48, WIDTH))
            self.down = nn.Parameter(torch.empty(WIDTH, 48))
            give_memory(self, torch.float32, torch.device("cpu"), lambda shape, **_: torch.randn(shape) / 8)

        def forward(self, token_ids: Any, batch: Any) -> Any:
            x = operations.project(operations.double(self.table(token_ids)), self.up)
            return operations.project(operations.double(x), self.down)

        def compute_logits(self, hidden: Any) -> Any:
            return self.table.as_head(hidden)

    return Model()


def test_op_declared_in_one_place_is_traced_lowered_and_run(model: Any) -> None:
    plan = planned(model)
    names = ["Embed", "Double", "Project", "Double", "Project"]
    assert [type(item).__name__ for item in plan.program.body] == names
    x = 2 * model.table.weight[IDS] @ model.up.T
    assert torch.allclose(run_prompt(plan, IDS), 2 * x @ model.down.T, atol=1e-5)


def test_op_before_a_product_from_outside_writes_the_rows_that_its_weight_wants(model: Any) -> None:
    body = planned(model, Format.bf16).program.body
    assert [item.out.type for item in body] == [
        RowType.f32, RowType.bf16, RowType.f32, RowType.bf16, RowType.f32
    ]  # fmt: skip


def test_op_from_outside_is_timed(model: Any) -> None:
    plan = planned(model)
    zero, tables = np.zeros(1, np.int32), np.arange(1, 8, dtype=np.int32).reshape(1, 1, -1)
    arrays = (zero, zero, np.array([3], np.int32), np.zeros(0, np.int32), np.array([IDS], np.int32), tables)
    times = plan.run_timed(BODY, *arrays)
    assert [op.name for op in times[1:3]] == [
        "Double: x [3, 32] f32, out [3, 32] f32", "Project: x [3, 32] f32, out [3, 48] f32, weight [48, 32] f32"
    ]  # fmt: skip
    assert [(op.flops, op.num_bytes) for op in times[1:3]] == [(3 * 32, 0), (2 * 3 * 32 * 48, 4 * 32 * 48)]
    assert all(op.microseconds > 0 for op in times)


def test_op_from_outside_is_explained_and_predicted(model: Any) -> None:
    program = planned(model).program
    names = {id(parameter): f"layers.0.{name}" for name, parameter in named_parameters(model)}
    rank = RankModel((), names, program.body, program.head, ())
    found = Calibration(
        "", 1, "", {}, 1, [(1, 1e9)], {"f32": [(1, 1e-9)]}, {}, {"Norm": (1e-6, 0.0), "Double": (5.0, 0.0)}, (0.0, 0.0)
    )
    config = replace(make_config(), uses_plan=True)
    device = Device(config.hardware, MachineLimits(1e9, {"fp32": 1e9}), "", None, found)
    phase = Phase("decode", StepShape(((0, 3),), 1), config, rank, device)
    assert [(op.name, op.shape, op.cost.flops) for op in phase.ops()] == [
        ("Embed table", "", 0), ("Double", "", 3 * 32), ("up", "3×32×48", 2 * 3 * 32 * 48),
        ("Double", "", 3 * 48), ("down", "3×48×32", 2 * 3 * 32 * 48), ("Convert", "", 0),
        ("head table", "1×32×19", 2 * 19 * 32),
    ]  # fmt: skip
    assert phase.flops_by_arithmetic == {"fp32": 2 * 2 * 3 * 32 * 48 + 3 * (32 + 48) + 2 * 19 * 32}
    assert phase.predicted_s is not None
    assert phase.predicted_s > 2 * 5.0
    assert any(row[0] == "up" for row in phase_section(phase, with_ops=True).rows)


@pytest.mark.parametrize("op", ["soft_cap", "rotary", "norm"])
def test_native_op_is_named_by_one_header_and_one_module(op: str) -> None:
    listed = subprocess.run(["git", "ls-files", "native", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    registered = re.compile(rf"QUIRE_OP\({op}\b")
    pushed = re.compile(rf"(push\(\s*|op, flops = |op = )\"{op}\"")
    texts = {name: (ROOT / name).read_text() for name in listed.stdout.split() if (ROOT / name).is_file()}
    assert len([name for name, text in texts.items() if registered.search(text)]) == 1
    assert len([name for name, text in texts.items() if pushed.search(text)]) == 1
    # Lists of ops, where each would need a line, do not exist.
    others = [name for name, text in texts.items() if re.search(rf"[\"(]{op}[\"),]", text) and "/ops/" not in name]
    assert [name for name in others if name.startswith("native/") and "self_test" not in name] == []
