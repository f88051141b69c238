"""`HeadDrafter`: guesses with a layer that predicts further tokens (MTP, EAGLE-3), from the model's hidden states.

At position i the layer reads the hidden state of i and the token i + 1, and predicts token i + 2. It follows each pass
of the model, because hidden states are gone after it: that costs one layer's time, while guesses pay or not.
Next to read: `models/hf_predictor.py`; `drafter.py` for the base.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.runtime.batch import RequestState, RequestStates, StepLayout
from quire.runtime.drafter import NO_TOKEN, Drafter, Guesses
from quire.runtime.forward import Forward
from quire.runtime.links import Links
from quire.runtime.plan.emit import BODY, PlannedModel


class HeadDrafter(Drafter):
    """Guesses with a plan whose input is hidden states."""

    shift = 1
    _layout: StepLayout

    def follow(self, layout: StepLayout, forward: Forward) -> None:
        """See `Drafter`. Rejected drafts are computed too, until the next pass of their positions replaces them."""
        num_rows = int(layout.counts.sum())
        self._planned.inputs[0][:num_rows] = self._hidden(layout, forward, num_rows)
        self._run(layout.rows, layout.starts, layout.counts)
        self._layout = layout

    def _hidden(self, layout: StepLayout, forward: Forward, num_rows: int) -> NDArray[np.float32]:
        """Return what it reads at each row of a pass. Shapes: [num_rows, E]."""
        hidden: NDArray[np.float32] = forward.hidden(0, num_rows)
        return hidden

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


class EagleDrafter(HeadDrafter):
    """Guesses with an EAGLE-3 head, which reads hidden states of three layers and has a vocabulary of its own."""

    def __init__(
        self, planned: PlannedModel, states: RequestStates, context_len: int, links: Links, joining: PlannedModel,
        kept: Sequence[NDArray[np.float32]], token_ids: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """`joining`: makes one value of the `kept` ones of a pass. `token_ids`: of the head's tokens."""
        super().__init__(planned, states, context_len, links)
        self._joining, self._kept, self._token_ids = joining, kept, token_ids.tolist()

    def _hidden(self, layout: StepLayout, forward: Forward, num_rows: int) -> NDArray[np.float32]:
        """See `HeadDrafter`."""
        np.concatenate([values[:num_rows] for values in self._kept], axis=1, out=self._joining.inputs[0][:num_rows])
        tables = self._states.tokens, self._states.block_tables
        self._joining.run(BODY, layout.rows, layout.starts, layout.counts, np.zeros(0, np.int32), *tables)
        return self._joining.hidden[:num_rows]

    def _guess(self, logit_rows: NDArray[np.int32]) -> list[tuple[int, float]]:
        """See `Drafter`."""
        guessed = super()._guess(logit_rows)
        return [(self._token_ids[index] if index != NO_TOKEN else index, share) for index, share in guessed]


def _last_computed(state: RequestState) -> int:
    """The position before the newest token."""
    return state.num_tokens - 2
