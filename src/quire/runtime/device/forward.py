"""`DeviceForward`: the protocol `Forward` (`runtime/forward.py`) by a device plan.

Next to read: `plan.py`.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.events import OpTime
from quire.runtime.batch import RequestStates, StepLayout
from quire.runtime.device.plan import DevicePlan, step_size


class DeviceForward:
    """A plan on a device. Hidden states and logits are copied to the host when they are asked for."""

    gives_shares = False

    def __init__(self, plan: DevicePlan) -> None:
        self.plan, self.times_ops = plan, False
        self._described: NDArray[np.int32] = np.zeros(0, np.int32)

    def run(self, layout: StepLayout, states: RequestStates, *, only_likeliest: bool) -> list[int | None] | None:
        self._launch(layout, states, None)
        return None

    def launch(self, layout: StepLayout, states: RequestStates) -> None:
        """Launch hidden states and logits, of inputs that the host may not know yet."""
        self._launch(layout, states, [state.num_tokens for _, state in layout.computed])
        if layout.sampled:
            with torch.inference_mode():
                self.plan.run_head(step_size(len(layout.logit_rows)))

    def _launch(self, layout: StepLayout, states: RequestStates, known: list[int] | None) -> None:
        with torch.inference_mode():
            self.plan.step.describe(layout, states, known)
            self._described = layout.logit_rows
            self.plan.run_body(step_size(int(layout.counts.sum())))

    def hidden(self, first: int, last: int) -> NDArray[np.float32]:
        return self.plan.hidden[first:last].cpu().numpy()

    def take_op_times(self) -> tuple[OpTime, ...]:
        return ()

    def logits(self, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        step, found = self.plan.step, []
        limit = len(step.logit_rows)
        with torch.inference_mode():
            for start in range(0, max(len(rows), 1), limit):
                some = rows[start : start + limit]
                if some is not self._described and not np.array_equal(some, self._described):
                    step.logit_rows[: len(some)] = torch.from_numpy(np.ascontiguousarray(some)).to(step.device)
                    self._described = some
                self.plan.run_head(step_size(len(some)))
                found.append(self.plan.logits[: len(some)].cpu().numpy().copy())
        return found[0] if len(found) == 1 else np.concatenate(found)

    def shares(self, rows: NDArray[np.int32]) -> Any:
        raise NotImplementedError
