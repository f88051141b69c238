"""A new op is one header in `native/ops/` and one module in `kernels/`: nothing else names it."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.kernels.instruction import Buffer, Columns, Cost, Emitter, Instruction, StepShape
from quire.kernels.lowering import LOWERS, Lowering, lowers
from quire.kernels.registry import KERNELS, kernel
from quire.kernels.tracing import SIZES, Call, same_sizes
from quire.layers.embedding import Embedding
from quire.runtime.eager import give_memory
from tests.runtime.plan.graphs import planned, run_prompt

ROOT = Path(__file__).parents[2]


@dataclass(eq=False, frozen=True, slots=True)
class Double(Instruction):
    """out = 2 · x, by the native op `scale`."""

    x: Columns
    out: Buffer

    def emit(self, to: Emitter) -> None:
        to.push("scale", x=to.rows(self.x), out=to.rows(self.out), width=self.out.width, factor=2.0)

    def cost(self, step: StepShape) -> Cost:
        return Cost(step.num_tokens * self.out.width)


@pytest.fixture
def doubled() -> Iterator[Any]:
    """Register a kernel, the sizes of its result and its lowering, as the import of an op's module does."""
    SIZES["double"] = same_sizes

    @kernel
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @lowers("double")
    def lower(to: Lowering, call: Call) -> None:
        (x,) = call.arguments
        to.append(Double(to.columns(x), to.result(call, takes_type=True)))

    yield double
    KERNELS.remove(double)
    del SIZES["double"], LOWERS["double"]


def test_op_declared_in_one_place_is_traced_lowered_and_run(doubled: Any) -> None:
    class Model(nn.Module):
        num_layers = 1

        def __init__(self) -> None:
            super().__init__()
            self.table = Embedding(19, 32)
            give_memory(self, torch.float32, torch.device("cpu"), lambda shape, **_: torch.randn(shape))

        def forward(self, token_ids: Any, batch: Any) -> Any:
            return doubled(self.table(token_ids))

        def compute_logits(self, hidden: Any) -> Any:
            return self.table.as_head(hidden)

    model = Model()
    plan = planned(model)
    assert [type(item).__name__ for item in plan.program.body] == ["Embed", "Double"]
    assert torch.equal(run_prompt(plan, [3, 1, 18]), 2 * model.table.weight[[3, 1, 18]])


@pytest.mark.parametrize("op", ["soft_cap", "rotary", "norm"])
def test_native_op_is_named_by_one_header_and_one_module(op: str) -> None:
    listed = subprocess.run(["git", "ls-files", "native", "src"], cwd=ROOT, capture_output=True, text=True, check=True)
    registered = re.compile(rf"QUIRE_OP\({op}\b")
    pushed = re.compile(rf"push\(\s*\"{op}\"")
    texts = {name: (ROOT / name).read_text() for name in listed.stdout.split() if (ROOT / name).is_file()}
    assert len([name for name, text in texts.items() if registered.search(text)]) == 1
    assert len([name for name, text in texts.items() if pushed.search(text)]) == 1
    # Lists of ops, where each would need a line, do not exist.
    others = [name for name, text in texts.items() if re.search(rf"[\"(]{op}[\"),]", text) and "/ops/" not in name]
    assert [name for name in others if name.startswith("native/") and "self_test" not in name] == []
