"""`DeviceRunner`: steps that are launched before the tokens of the step before are known on the host.

A step is asynchronous if the device can sample all its requests and the host reads nothing else of it: then `launch`
queues its work on the device, which feeds each token to the next step, and `finish` waits for the tokens. Any other
step is synchronous: the steps in flight are awaited first, and `ModelRunner` computes it within `launch`. So a request
may be in flight twice whatever it asks for, and the records of requests are exact whenever the host reads tokens.
Next to read: `sampler.py`, `runtime/model_runner.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.errors import EngineDeadError
from quire.runtime.batch import RequestState, StepLayout, lay_out
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.device.forward import DeviceForward
from quire.runtime.device.plan import step_size
from quire.runtime.device.sampler import make_row_sampler
from quire.runtime.model_runner import ModelRunner
from quire.sampling.native import NativeRowSampler
from quire.sampling.sampler import Sampler
from quire.sampling.state import SamplingState
from quire.transfers import TransferReport
from quire.types import RequestResult, ScheduledRequest, SchedulerOutput, StepResult

_FATAL = ("CUDA error", "HIP error", "Error [CUDA]", "CUBLAS_STATUS")
"""In the text of an error after which every later call of the device fails."""


@dataclass(slots=True, eq=False)
class Pending:
    """A launched step, with what `finish` needs, so that later steps may change the records of requests.

    tokens: memory of the host that has them once `event` has come; event: None where launches compute at once.
    result: once it is known. error: the step could not be launched.
    """

    output: SchedulerOutput
    sampled: Sequence[tuple[ScheduledRequest, RequestState, SamplingState]] = ()
    tokens: torch.Tensor | None = None
    event: torch.cuda.Event | None = None
    transfers: TransferReport | None = None
    result: StepResult | None = None
    error: Exception | None = None

    def wait(self) -> None:
        """Wait for the device, without the interpreter's lock. Raises: RuntimeError if the device failed."""
        if self.event is not None:
            self.event.synchronize()


class DeviceRunner(ModelRunner):
    """Runs steps of a device plan, two in flight."""

    max_in_flight = 2

    def __init__(
        self, config: EngineConfig, forward: DeviceForward, cache: CacheEngine, sampler: Sampler, **parts: Any
    ) -> None:
        """`parts`: further arguments of `ModelRunner`."""
        super().__init__(config, forward, cache, sampler, **parts)
        assert isinstance(sampler.rows, NativeRowSampler)
        self._device_forward = forward
        self._rows = make_row_sampler(forward.plan, config.gpu_kernels, sampler.rows)
        self._read_until: NDArray[np.int32] = np.zeros(config.scheduler.max_num_seqs, np.int32)
        """Per row the number of tokens up to which the host reads hidden states: all of the prompt, or none."""
        self._launched: list[Pending] = []
        """Asynchronous steps whose tokens the host has not read."""
        if config.gpu_kernels == "triton" and forward.plan.step.device.type == "cuda":
            self._warm_up(config.scheduler.max_num_seqs)

    def _warm_up(self, max_num_seqs: int) -> None:
        """Compile all kernels and capture the graphs of decodes, so that no request waits for either.

        A step without requests computes padding. Graphs of steps with prompts are captured as their sizes come.
        """
        plan = self._device_forward.plan
        sizes = sorted({step_size(number) for number in range(1, max_num_seqs + 1)}, reverse=True)
        with torch.inference_mode():
            for has_decodes in (True, False):
                plan.step.has_decodes, plan.step.has_prompts = has_decodes, True
                plan.run_body(sizes[0])
            plan.step.has_decodes, plan.step.has_prompts = True, False
            for size in sizes:
                for _ in ("compiled", "captured"):
                    plan.run_body(size)
                    plan.run_head(size)
                    self._rows.warm_up(size)
        torch.cuda.synchronize()

    def launch(self, output: SchedulerOutput) -> Pending:
        """See `ModelRunner`. An exception is kept for `finish`."""
        pending = Pending(output)
        try:
            self._launch(output, pending)
        except Exception as error:
            pending.error = error
        return pending

    def finish(self, launched: Pending) -> StepResult:
        """See `ModelRunner`. Raises: EngineDeadError if the device failed, else what the step raised."""
        try:
            if launched.error is not None:
                raise launched.error
            return self._read(launched)
        except RuntimeError as error:
            if any(sign in str(error) for sign in _FATAL):
                raise EngineDeadError(f"the device failed, and needs a new process: {error}") from error
            raise

    def run(self, output: SchedulerOutput) -> StepResult:
        """See `ModelRunner`."""
        return self.finish(self.launch(output))

    def _launch(self, output: SchedulerOutput, pending: Pending) -> None:
        """Launch a step, or compute it. Mutates: pending."""
        if output.forgets_all:
            for earlier in self._launched:  # it may still read what is sent again
                earlier.wait()
            self._launched.clear()
        states = self._begin(output)
        for new in output.new_requests:
            self._add(self.states[new.request_id])
        if not output.num_tokens:
            pending.result = self._idle(output)
            return
        layout = lay_out(output, states)
        rows, positions = _sampled_at(layout)
        if self._needs_host(layout, rows, positions):
            for earlier in tuple(self._launched):
                self._read(earlier)
            pending.result = self._compute(output, layout)
            return
        self._device_forward.launch(layout, self.states)
        if layout.sampled:
            pending.sampled, of_rows = layout.sampled, [sampling for _, _, sampling in layout.sampled]
            with torch.inference_mode():
                pending.tokens = self._rows.launch(rows, positions, layout.logit_index, of_rows)
        if self._device_forward.plan.step.device.type == "cuda":
            pending.event = torch.cuda.Event()
            pending.event.record()
        pending.transfers = self.cache.report()
        self._launched.append(pending)

    def _add(self, state: RequestState) -> None:
        self._rows.add(state)
        is_read = state.sampling is None or state.sampling.params.prompt_logprobs is not None
        self._read_until[state.row] = state.new.num_prompt_tokens if is_read else 0

    def _needs_host(self, layout: StepLayout, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> bool:
        """Return True if the host must read tokens, logits or hidden states before the step ends."""
        return (
            not self._rows.takes(rows, positions)
            or bool((layout.starts < self._read_until[layout.rows]).any())
            or any(item.draft_token_ids for item, _ in layout.computed)
        )

    def _read(self, pending: Pending) -> StepResult:
        """Wait for the tokens of a step, and bring the records of its requests up to them. Mutates: pending."""
        if pending.result is not None:
            return pending.result
        pending.wait()
        self._launched.remove(pending)
        token_ids = [] if pending.tokens is None else pending.tokens.tolist()
        results = []
        for (item, state, sampling), token_id in zip(pending.sampled, token_ids, strict=True):
            if token_id < 0:
                error, code = sampling.explain_failure()
                results.append(RequestResult(item.request_id, error=error, error_code=code))
                continue
            if self.states.by_id.get(item.request_id) is state:  # else its row may be another request's
                self.states.append(state, token_id)
            results.append(RequestResult(item.request_id, (token_id,)))
        pending.result = StepResult(pending.output.step_id, tuple(results), transfers=pending.transfers)
        return pending.result


def _sampled_at(layout: StepLayout) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return row and number of tokens of each request that samples, when it samples."""
    ends = {item.request_id: item.num_computed_tokens + item.num_tokens for item, _ in layout.computed}
    rows = [state.row for _, state, _ in layout.sampled]
    positions = [ends[item.logits_from or item.request_id] for item, _, _ in layout.sampled]
    return np.array(rows, np.int32), np.array(positions, np.int32)
