"""When a sequence ends by its own tokens: EOS, then stop tokens, then length. Stop strings are the engine's.

Next to read: `scheduler.py`, which calls this after each sampled token.
"""

from typing import NamedTuple

from quire.types import Request, RequestStatus


class Stop(NamedTuple):
    """How a sequence ended; `reason` is the stop token's id, None for EOS and length."""

    status: RequestStatus
    reason: int | None


def check_stop(request: Request, token_id: int, max_model_len: int) -> Stop | None:
    """Whether `token_id`, already the request's last, ends it. Before `min_tokens` only length does."""
    num_output = len(request.output_token_ids)
    sampling = request.sampling
    if sampling is not None and num_output >= sampling.min_tokens:
        if token_id in request.eos_token_ids and not sampling.ignore_eos:
            return Stop(RequestStatus.FINISHED_STOPPED, None)
        if sampling.stop_token_ids and token_id in sampling.stop_token_ids:
            return Stop(RequestStatus.FINISHED_STOPPED, token_id)
    if num_output >= request.max_tokens or request.num_tokens >= max_model_len:
        return Stop(RequestStatus.FINISHED_LENGTH, None)
    return None
