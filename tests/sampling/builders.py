"""Requests and one-call sampling for the tests of this folder."""

from collections.abc import Sequence
from typing import Any

import torch

from quire.sampling.reference import Sampled, rank_candidates, tempered_probabilities
from quire.sampling.sampler import Sampler
from quire.sampling.state import SamplingState
from quire.sampling_params import SamplingParams
from quire.types import NewRequest, TokenLogprobs

CPU = "cpu"
EXAMPLE = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05])


def gaussian(rows: int, vocab_size: int, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, **fields})


def new_request(
    request_id: str = "a",
    sampling: SamplingParams | None = None,
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    seed: int = 0,
    eos: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        token_ids=(*prompt, *output),
        num_prompt_tokens=len(prompt),
        sampling=sampling or params(),
        pooling=None,
        eos_token_ids=tuple(eos),
        seed=seed,
        bad_words_token_ids=tuple(tuple(words) for words in bad_words),
    )


class ById:
    """A sampler with its requests' states by id."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.states: dict[str, SamplingState] = {}

    def add_request(self, new: NewRequest) -> None:
        if (state := self.sampler.start(new)) is not None:
            self.states[new.request_id] = state

    def append_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.states[request_id].append(token_id)

    def sample(self, logits: torch.Tensor, request_ids: Sequence[str]) -> list[Sampled]:
        return self.sampler.sample(logits, [self.states[request_id] for request_id in request_ids])

    def failure(self, request_id: str) -> tuple[str, str | None]:
        return self.states[request_id].explain_failure()


def sample_all(logits: torch.Tensor, requests: Sequence[NewRequest]) -> list[tuple[int, TokenLogprobs | None]]:
    """Sample one token for each request from its row of a copy of the logits."""
    sampler = ById(Sampler(logits.shape[-1], logits.device.type))
    for new in requests:
        sampler.add_request(new)
    return sampler.sample(logits.clone(), [new.request_id for new in requests])


def sample_one(logits: Sequence[float] | torch.Tensor, new: NewRequest) -> int:
    """Sample one token of one request from one row of logits [V]."""
    return sample_all(torch.as_tensor(logits, dtype=torch.float32)[None, :], [new])[0][0]


def draw_many(logits: torch.Tensor, sampling: SamplingParams, count: int, **of_request: Any) -> torch.Tensor:
    """Draw `count` tokens, each with its own seed, from the same row of logits [V]."""
    requests = [new_request(str(seed), sampling, seed=seed, **of_request) for seed in range(count)]
    chosen = sample_all(logits.expand(count, -1).clone(), requests)
    return torch.tensor([token_id for token_id, _ in chosen])


def filtered_probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return the exact distribution that the sampler draws from; a greedy row is 1 at its argmax.

    `logits` are those after masks, bias and penalties. Shapes: [R, V] -> [R, V]. Dtypes: fp32 -> fp32.
    """
    drawn = [row for row, p in enumerate(params) if not p.is_greedy]
    filtered = torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    if drawn:
        wanted = [params[row] for row in drawn]
        token_ids, weights, _ = rank_candidates(tempered_probabilities(logits[drawn].float(), wanted), wanted)
        shares = (weights / weights.sum(dim=-1, keepdim=True).double()).float()
        filtered[drawn] = torch.zeros_like(shares).scatter_(-1, token_ids, shares)
    return filtered
