"""`HeadDrafter`: guesses with the model's own layer that predicts further tokens (MTP), from the model's hidden states.

At position i the layer reads the hidden state of i and the token i + 1, and predicts token i + 2. It follows each pass
of the model, because hidden states are gone after it: that costs one layer's time, while guesses pay or not.
Next to read: `models/hf_predictor.py`; `drafter.py` for the base.
"""

import numpy as np
from numpy.typing import NDArray

from quire.runtime.batch import RequestState, StepLayout
from quire.runtime.drafter import Drafter, Guesses
from quire.runtime.forward import Forward


class HeadDrafter(Drafter):
    """Guesses with a plan whose input is hidden states."""

    shift = 1
    _layout: StepLayout

    def follow(self, layout: StepLayout, forward: Forward) -> None:
        """See `Drafter`. Rejected drafts are computed too, until the next pass of their positions replaces them."""
        num_rows = int(layout.counts.sum())
        self._planned.inputs[0][:num_rows] = forward.hidden(0, num_rows)
        self._run(layout.rows, layout.starts, layout.counts)
        self._layout = layout

    def _first_pass(self, wanted: list[Guesses]) -> tuple[list[Guesses], NDArray[np.int32]]:
        """See `Drafter`: it is computed. A sibling that the step forks has no row of its own."""
        row_of = {
            state.row: first_row - start
            for (_, state), first_row, start in zip(
                self._layout.computed, self._layout.first_rows, self._layout.starts.tolist(), strict=True
            )
        }
        ready = [item for item in wanted if item.state.row in row_of]
        rows = [row_of[item.state.row] + _last_computed(item.state) for item in ready]
        return ready, np.array(rows, np.int32)

    def _carry(self, rows: NDArray[np.int32]) -> None:
        """See `Drafter`."""
        self._planned.inputs[0][: len(rows)] = self._planned.hidden[rows]


def _last_computed(state: RequestState) -> int:
    """The position before the newest token."""
    return state.num_tokens - 2
