"""`DeviceRowSampler`: tokens from a device plan's logits without a host read. The device keeps each for the next step.

It takes requests that want the logits as they are: greedy, temperature, min_p, top_k up to `MAX_K`, top_p. All others
are sampled on the host. A draw's position is that of the schedule, since the host learns tokens one step late.
Next to read: `sampling/triton.py` for the kernels, `runner.py` for the caller.
"""

import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quire.runtime.batch import RequestState
from quire.runtime.device.memory import NUM_COPIES
from quire.runtime.device.plan import DevicePlan, SizedSteps, step_size
from quire.sampling.native import NativeRowSampler
from quire.sampling.state import SamplingState

MAX_K = 512
"""Largest `top_k` that the kernels take."""
_LOG2_E = 1.4426950408889634
_REACHED = 1.0 - 1e-6
"""See `kReached` of native/sampling/row.cpp."""


class DeviceRowSampler:
    """The parameters of requests by their rows, and the memory of their tokens. Subclasses choose the tokens."""

    def __init__(self, plan: DevicePlan) -> None:
        self._plan = plan
        self._takes_from: NDArray[np.int64] = np.zeros(len(plan.step.last_tokens), np.int64)
        """Per row the number of tokens from which on the device samples the request."""

    def add(self, state: RequestState) -> None:
        """Prepare a request that is new in its row."""
        sampling, takes_from = state.sampling, sys.maxsize
        if sampling is not None and not state.new.awaits_external_token and self.top_k_of(sampling) <= MAX_K:
            takes_from = sampling.plain_from
        self._takes_from[state.row] = takes_from

    def top_k_of(self, sampling: SamplingState) -> int:
        """Return the request's top_k; 0: all tokens."""
        top_k = sampling.params.top_k
        return top_k if 0 < top_k < self._plan.logits.shape[1] else 0

    def takes(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> bool:
        """Return True if the device can sample all these requests at these positions. Shapes: [S]."""
        return bool((self._takes_from[rows] <= positions).all())

    def launch(
        self,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        logit_index: Sequence[int] | None,
        states: Sequence[SamplingState],
    ) -> torch.Tensor:
        """Choose the tokens of `rows` of `RequestStates` from the step's logits; `logit_index`: see `StepLayout`.

        Returns: memory of the host in which the tokens are once the device has come so far; -1: no choice.
        Mutates: the step's `last_tokens`.
        """
        raise NotImplementedError

    def warm_up(self, num_rows: int) -> None:
        """Compile and capture what `launch` runs for steps of this size."""


class HostRowSampler(DeviceRowSampler):
    """Chooses by the CPU's sampler, on copied logits: the definition, and what a device without kernels does."""

    def __init__(self, plan: DevicePlan, rows: NativeRowSampler) -> None:
        super().__init__(plan)
        self._rows = rows

    def launch(
        self,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        logit_index: Sequence[int] | None,
        states: Sequence[SamplingState],
    ) -> torch.Tensor:
        """See `DeviceRowSampler`."""
        logits = self._plan.logits[list(range(len(rows)) if logit_index is None else logit_index)].cpu().numpy()
        tokens = torch.from_numpy(self._rows.sample_at(logits, states, positions.tolist()))
        last_tokens = self._plan.step.last_tokens
        last_tokens[torch.from_numpy(rows).to(last_tokens.device).long()] = tokens.to(last_tokens.device)
        return tokens


class TritonRowSampler(DeviceRowSampler):
    """Chooses by the kernels of `sampling/triton.py`, in one graph per size of step."""

    def __init__(self, plan: DevicePlan, pool: object) -> None:
        """`pool`: the memory of graphs; None: the kernels are launched each time."""
        from quire.sampling import triton as kernels

        super().__init__(plan)
        self._kernels = kernels
        num_rows, self._vocab_size = step_size(len(plan.step.last_tokens)), plan.logits.shape[1]
        device, width = plan.logits.device, kernels.NUM_OPTIONS.value
        self._num_chunks = chunks = -(-self._vocab_size // kernels.CHUNK)
        self._table: NDArray[np.int32] = np.zeros((len(self._takes_from), width), np.int32)
        is_pinned = device.type == "cuda"
        self._hosts = [torch.zeros(num_rows, width, dtype=torch.int32, pin_memory=is_pinned) for _ in range(NUM_COPIES)]
        self._founds = [torch.zeros(num_rows, dtype=torch.int32, pin_memory=is_pinned) for _ in range(NUM_COPIES)]
        self._options = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        self._tokens, self._bounds, self._num_pooled = torch.zeros(3, num_rows, dtype=torch.int32, device=device)
        self._maxima = torch.zeros(num_rows, chunks * (kernels.CHUNK // kernels.GROUP), device=device)
        self._chunk_maxima = torch.zeros(num_rows, chunks, device=device)
        self._chunk_weights = torch.zeros(num_rows, chunks, dtype=torch.int64, device=device)
        self._best = torch.zeros(num_rows, kernels.POOL, dtype=torch.int64, device=device)
        self._steps = SizedSteps(self.calls, pool)
        self._num_launched = 0

    def add(self, state: RequestState) -> None:
        """See `DeviceRowSampler`."""
        super().add(state)
        if state.sampling is not None:
            self._table[state.row] = row_options(state.sampling, self.top_k_of(state.sampling))

    def launch(
        self,
        rows: NDArray[np.int32],
        positions: NDArray[np.int32],
        logit_index: Sequence[int] | None,
        states: Sequence[SamplingState],
    ) -> torch.Tensor:
        """See `DeviceRowSampler`."""
        num_rows, size, kernels = len(rows), step_size(len(rows)), self._kernels
        place = self._num_launched % NUM_COPIES
        self._num_launched += 1
        host, found = self._hosts[place], self._founds[place]
        options = host.numpy()
        options[:num_rows] = self._table[rows]
        options[:num_rows, kernels.LOGIT_ROW] = np.arange(num_rows) if logit_index is None else logit_index
        options[:num_rows, kernels.TARGET], options[:num_rows, kernels.POSITION] = rows, positions
        options[num_rows:size, kernels.TARGET] = -1
        self._options[:size].copy_(host[:size], non_blocking=True)
        self._steps.run(size)
        found[:num_rows].copy_(self._tokens[:num_rows], non_blocking=True)
        return found[:num_rows]

    def warm_up(self, num_rows: int) -> None:
        """See `DeviceRowSampler`. Mutates: the options, which become those of no request."""
        self._options[:, self._kernels.TARGET.value] = -1
        self._steps.run(num_rows)

    def calls(self, num_rows: int) -> list[Callable[[], None]]:
        """Return the launches for `num_rows` rows."""
        k, logits, options, vocab = self._kernels, self._plan.logits, self._options, self._vocab_size
        groups = self._num_chunks * (k.CHUNK // k.GROUP)
        padded, padded_chunks = 1 << (groups - 1).bit_length(), max(16, 1 << (self._num_chunks - 1).bit_length())
        maxima, chunk_maxima, weights = self._maxima, self._chunk_maxima, self._chunk_weights
        bounds, pooled, best = self._bounds, self._num_pooled, self._best
        sizes = {"V": vocab, "NUM_CHUNKS": self._num_chunks, "CHUNK": k.CHUNK, **k.NO_FUSION}
        by_chunk, last_tokens = (num_rows, self._num_chunks), self._plan.step.last_tokens
        weighing = {"NUM_GROUPS": groups, "PADDED": padded, "PADDED_CHUNKS": padded_chunks, "NUCLEUS": k.NUCLEUS}
        choosing = {"PADDED_CHUNKS": padded_chunks, "POOL": k.POOL, "NUCLEUS": k.NUCLEUS, "num_warps": 8}
        return [
            lambda: k.scan[by_chunk](logits, options, maxima, chunk_maxima, GROUP=k.GROUP, **sizes),
            lambda: k.weigh[num_rows, self._num_chunks + 1](
                logits, options, maxima, chunk_maxima, weights, bounds, pooled, **sizes, **weighing
            ),
            lambda: k.collect[by_chunk](
                logits, options, maxima, bounds, pooled, best, GROUPS=k.CHUNK // k.GROUP, POOL=k.POOL, **sizes
            ),
            lambda: k.choose[(num_rows,)](
                logits,
                options,
                chunk_maxima,
                weights,
                bounds,
                best,
                pooled,
                self._tokens,
                last_tokens,
                **sizes,
                **choosing,
            ),
        ]


def row_options(sampling: SamplingState, top_k: int) -> NDArray[np.int32]:
    """Return a request's columns of the kernels' options, by the arithmetic of `weighing_for` in row.cpp."""
    params, seed = sampling.params, sampling.seed & (2**64 - 1)
    temperature = 0.0 if params.is_greedy else float(np.float32(params.temperature))
    scale = _LOG2_E / temperature if temperature else 1.0
    share = int(np.float64(params.top_p * _REACHED).view(np.int64))
    ints = [0, 0, 0, top_k, int(params.top_p >= 1), *(part & 0xFFFFFFFF for part in (seed, seed >> 32))]
    ints += [share & 0xFFFFFFFF, share >> 32 & 0xFFFFFFFF]
    floats = np.array([scale, -80.0 / scale, params.min_p, temperature, 0, 0, 0], np.float32)
    return np.concatenate((np.array(ints, np.uint32).view(np.int32), floats.view(np.int32)))


def make_row_sampler(plan: DevicePlan, kernels: str, rows: NativeRowSampler) -> DeviceRowSampler:
    """Return the sampler of a device plan. `kernels`: see `EngineConfig.gpu_kernels`."""
    return TritonRowSampler(plan, plan.graph_pool) if kernels == "triton" else HostRowSampler(plan, rows)
