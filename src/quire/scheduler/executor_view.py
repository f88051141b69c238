"""`ExecutorView`: what the executor has been told, so that each step tells it only what is new.

Turns a `StepPlan` into a `SchedulerOutput`. The executor reads an output in this order: forget `finished_ids` and
`preempted_ids`, make `transfers`, take up `new_requests`, compute `scheduled`. An id may be forgotten and be new in one
output. News for the executor waits for the next step that computes something, so an empty output may be dropped.
After a step that is lost nobody knows what the executor has taken in, so the next one starts from nothing.
"""

from quire.scheduler.blocks import BlockManager
from quire.scheduler.step_plan import Share, StepPlan
from quire.types import NewRequest, Request, ScheduledRequest, SchedulerOutput


class ExecutorView:
    """Per request: how many of its tokens the executor knows."""

    def __init__(self) -> None:
        self._num_sent: dict[str, int] = {}
        self._preempted: list[str] = []
        self._finished: list[str] = []
        self._forgets_all = False

    def note_preempted(self, request_id: str) -> None:
        """The executor shall forget the request, if it knows it, until it returns as new."""
        if self._num_sent.pop(request_id, None) is not None:
            self._preempted.append(request_id)

    def note_finished(self, request_id: str) -> None:
        """The executor shall forget the request, if it knows it."""
        if self._num_sent.pop(request_id, None) is not None:
            self._finished.append(request_id)

    def note_rounds(self, request_id: str, num_rounds: int) -> None:
        """The executor sampled so many tokens: it knows all that it went on to compute with, all but the last."""
        if num_rounds > 1 and request_id in self._num_sent:
            self._num_sent[request_id] += num_rounds - 1

    def forget_all(self) -> None:
        """The executor shall forget every request; those that go on return as new."""
        self._num_sent.clear()
        self._preempted, self._finished = [], []
        self._forgets_all = True

    def describe(self, step_id: int, plan: StepPlan, blocks: BlockManager) -> SchedulerOutput:
        """The step for the executor. From now on it knows what this says."""
        if not plan.shares:
            return SchedulerOutput(step_id, (), (), (), (), ())
        new_requests: list[NewRequest] = []
        scheduled: list[ScheduledRequest] = []
        for request_id, share in plan.shares.items():
            request = share.request
            num_tokens, num_sent = request.num_tokens, self._num_sent.get(request_id)
            new_token_ids: tuple[int, ...] = ()
            if num_sent is None:
                new_requests.append(_describe_new(request))
            elif num_sent < num_tokens:
                new_token_ids = tuple(request.token_slice(num_sent, num_tokens))
            self._num_sent[request_id] = num_tokens
            scheduled.append(_describe_share(share, new_token_ids, blocks))
        transfers = tuple(item for share in plan.shares.values() for item in share.transfers)
        preempted, finished = tuple(self._preempted), tuple(self._finished)
        self._preempted, self._finished = [], []
        forgets_all, self._forgets_all = self._forgets_all, False
        return SchedulerOutput(
            step_id, tuple(new_requests), tuple(scheduled), transfers, preempted, finished, forgets_all, plan.max_rounds
        )


def _describe_new(request: Request) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        token_ids=tuple(request.token_slice(0, request.num_tokens)),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        pooling=request.pooling,
        eos_token_ids=tuple(sorted(request.eos_token_ids)),
        seed=request.seed,
        bad_words_token_ids=request.bad_words_token_ids,
    )


def _describe_share(share: Share, new_token_ids: tuple[int, ...], blocks: BlockManager) -> ScheduledRequest:
    request = share.request
    return ScheduledRequest(
        request.request_id,
        request.num_computed_tokens,
        share.num_tokens,
        share.catches_up and request.sampling is not None,
        new_token_ids,
        blocks.take_table_updates(request.request_id),
        share.logits_from,
    )
