"""`HeadDrafter`: guesses with layers that predict further tokens (MTP, EAGLE-3), from the model's hidden states.

At position i the first layer reads the hidden state of i and the token i + 1, and predicts token i + 2. Hidden states
are gone after the pass that computed them, so it keeps those of decodes until guesses are asked for. A request of
which `MAX_WAITING` wait is left: it gets no guesses until its next prompt, and costs nothing. To read them all together
would cost 3 to 4 % of SmolLM2's tokens per second, for guesses that the controller does not want.
Of several layers, layer k reads at i the values of layer k - 1 and the token i + 1 + k, and predicts token i + 2 + k.
The tokens behind the newest one are guesses at that time, so the last positions are computed again in the next pass.
Next to read: `models/hf_predictor.py`; `drafter.py` for the base.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.runtime.batch import RequestState, RequestStates, StepLayout
from quire.runtime.drafter import NO_TOKEN, Drafter, Guesses
from quire.runtime.forward import Forward
from quire.runtime.links import Links
from quire.runtime.plan.emit import BODY, PlannedModel
from quire.types import Draft

MAX_WAITING = 64
"""Positions of a request that wait: as many as make a pass a small part of the steps in which they came."""
_NONE: NDArray[np.int32] = np.zeros(0, np.int32)


@dataclass(slots=True)
class Waiting:
    """Hidden states of one request's positions that the layers have not read, pass by pass."""

    state: RequestState
    passes: list[tuple[int, NDArray[np.float32]]] = field(default_factory=list)
    """First position and rows of each."""
    is_left: bool = False
    """Positions were passed over, so that the layers lack their keys and values."""

    def take(self, num_kept: int) -> tuple[int, list[NDArray[np.float32]]]:
        """Return the first position and all rows, and keep the last `num_kept` positions waiting.

        A later pass replaces positions of rejected drafts, and those behind the newest token's hidden state are left
        out. Shapes: [n, E] each, together without a gap.
        """
        ends = [*(start for start, _ in self.passes[1:]), self.state.num_tokens - 1]
        rows = [rows[: max(0, end - start)] for (start, rows), end in zip(self.passes, ends, strict=True)]
        first, last = self.passes[0][0], rows[-1]
        end = self.passes[-1][0] + len(last)
        for earlier in rows[-2::-1] if num_kept else ():
            last = last if len(last) >= num_kept else np.concatenate((earlier, last))
        last = last[max(0, len(last) - num_kept) :]
        self.passes = [(end - len(last), last)] if len(last) else []
        return first, rows


class HeadDrafter(Drafter):
    """Guesses with a plan for each layer, whose input is hidden states. The last layer guesses all further tokens."""

    def __init__(self, layers: Sequence[PlannedModel], states: RequestStates, context_len: int, links: Links) -> None:
        super().__init__(layers[0], states, context_len, links)
        self._layers, self.shift = layers, len(layers)
        self._num_waiting = 0
        self._pass = _NONE, _NONE, _NONE
        """Rows, starts and counts of the positions that the layers read last."""

    def follow(self, layout: StepLayout, forward: Forward) -> None:
        """See `Drafter`. Prompts are read at once, so that the blocks of prefix hits are complete."""
        num_rows = int(layout.counts.sum())
        if self._num_waiting + num_rows > self._planned.limits.max_tokens:
            self._compute_waiting(self._states.by_id.values())
        hidden, of_prompts = self._hidden(forward, num_rows), list[RequestState]()
        for (item, state), first_row, start, count in zip(
            layout.computed, layout.first_rows, layout.starts.tolist(), layout.counts.tolist(), strict=True
        ):
            waiting: Waiting | None = state.waiting
            if waiting is None:
                waiting = state.waiting = Waiting(state)
            if waiting.is_left:
                continue
            waiting.passes.append((start, hidden[first_row : first_row + count]))
            if item.num_computed_tokens < state.new.num_prompt_tokens:
                of_prompts.append(state)
            elif start + count - waiting.passes[0][0] > MAX_WAITING:
                waiting.is_left, waiting.passes = True, []
        self._num_waiting += num_rows
        if of_prompts:
            self._compute_waiting(of_prompts)

    def propose(self, states: Sequence[RequestState], num_tokens: int) -> dict[str, Draft]:
        """See `Drafter`. Layers that no draft reached read their positions, too."""
        drafts = super().propose(states, num_tokens)
        for index in range(self._layers.index(self._planned) + 1, len(self._layers)):
            self._run_layer(index)
        return drafts

    def _hidden(self, forward: Forward, num_rows: int) -> NDArray[np.float32]:
        """Return a copy of what the first layer reads of each row of a pass. Shapes: [num_rows, width]."""
        hidden: NDArray[np.float32] = forward.hidden(0, num_rows).copy()
        return hidden

    def _read(self, hidden: NDArray[np.float32]) -> None:
        """Make the input of the first layer of these rows."""
        self._layers[0].inputs[0][: len(hidden)] = hidden

    def _compute_waiting(self, states: Collection[RequestState]) -> None:
        """Let all layers read what waits of these requests."""
        if self._read_waiting(states):
            for index in range(1, len(self._layers)):
                self._run_layer(index)

    def _read_waiting(self, states: Collection[RequestState]) -> dict[int, int]:
        """Let the first layer read what waits of these requests. Returns: by their rows, the last row of each in the
        pass; empty if nothing waits."""
        known: list[Waiting] = [state.waiting for state in self._states.by_id.values() if state.waiting is not None]
        readers: list[Waiting] = [state.waiting for state in states if state.waiting is not None]
        readers = [each for each in readers if each.passes]
        if not readers:
            return {}
        taken = [each.take(len(self._layers) - 1) for each in readers]
        counts = np.array([sum(map(len, rows)) for _, rows in taken], np.int32)
        rows = np.array([each.state.row for each in readers], np.int32)
        self._pass = rows, np.array([first for first, _ in taken], np.int32), counts
        self._num_waiting = sum(len(rows) for each in known for _, rows in each.passes)
        self._read(np.concatenate([part for _, parts in taken for part in parts]))
        self._run_layer(0)
        return dict(zip(rows.tolist(), (np.cumsum(counts) - 1).tolist(), strict=True))

    def _run_layer(self, index: int) -> None:
        """Run a layer on the positions of the last pass. It makes the next guesses."""
        self._planned = self._layers[index]
        if index:
            num_rows = int(self._pass[2].sum())
            self._planned.inputs[0][:num_rows] = self._layers[index - 1].hidden[:num_rows]
        tokens = self._states.tokens[:, index + 1 :]
        self._planned.run(BODY, *self._pass, _NONE, tokens, self._states.block_tables)

    def _first_pass(self, wanted: list[Guesses]) -> tuple[list[Guesses], NDArray[np.int32]]:
        """See `Drafter`. A sibling that the step forks has no row of its own."""
        last_rows = self._read_waiting([item.state for item in wanted])
        if not last_rows:
            self._planned = self._layers[-1]
            return [], _NONE
        ready = [item for item in wanted if item.state.row in last_rows]
        return ready, np.array([last_rows[item.state.row] for item in ready], np.int32)

    def _next_pass(self, active: list[Guesses], logit_rows: NDArray[np.int32], ahead: int) -> NDArray[np.int32]:
        """See `Drafter`: with the next layer at the same positions, or with the last one at the next position."""
        if ahead + 1 < len(self._layers):
            self._run_layer(ahead + 1)
            return logit_rows
        self._planned.inputs[0][: len(logit_rows)] = self._planned.hidden[logit_rows]
        return super()._next_pass(active, logit_rows, ahead)


class EagleDrafter(HeadDrafter):
    """Guesses with an EAGLE-3 head, which reads hidden states of three layers and has a vocabulary of its own."""

    def __init__(
        self,
        planned: PlannedModel,
        states: RequestStates,
        context_len: int,
        links: Links,
        joining: PlannedModel,
        kept: Sequence[NDArray[np.float32]],
        token_ids: NDArray[np.int64],
    ) -> None:
        """`joining`: makes one value of the `kept` ones of a pass. `token_ids`: of the head's tokens."""
        super().__init__([planned], states, context_len, links)
        self._joining, self._kept, self._token_ids = joining, kept, token_ids.tolist()

    def _hidden(self, forward: Forward, num_rows: int) -> NDArray[np.float32]:
        """See `HeadDrafter`."""
        return np.concatenate([values[:num_rows] for values in self._kept], axis=1)

    def _read(self, hidden: NDArray[np.float32]) -> None:
        """See `HeadDrafter`."""
        self._joining.inputs[0][: len(hidden)] = hidden
        tables = self._states.tokens, self._states.block_tables
        self._joining.run(BODY, *self._pass, _NONE, *tables)
        super()._read(self._joining.hidden[: len(hidden)])

    def _guess(self, logit_rows: NDArray[np.int32]) -> list[tuple[int, float]]:
        """See `Drafter`."""
        guessed = super()._guess(logit_rows)
        return [(self._token_ids[index] if index != NO_TOKEN else index, share) for index, share in guessed]
