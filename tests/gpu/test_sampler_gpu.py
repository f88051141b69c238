"""The sampler on CUDA: same code, so what is checked is that the device makes no difference."""

import pytest
import torch

from quire.types import NewRequest
from tests.sampling.builders import new_request, params, sample_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB_SIZE = 49_152


def mixed_batch() -> list[NewRequest]:
    wanted = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.5, "top_p": 0.95},
        {"top_k": 40},
        {"top_k": 1500, "top_p": 0.9},
        {"min_p": 0.05, "logprobs": 3},
        {"temperature": 0.0, "logprobs": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"allowed_token_ids": [5, 6, 7], "logit_bias": {6: 2.0}},
        {"presence_penalty": 1.0, "min_tokens": 5, "top_p": 0.5},
    ]
    return [
        new_request(
            str(index), params(**fields), prompt=[1, 2, 3], output=[4, 4], seed=index, eos=[2], bad_words=[[9], [4, 8]]
        )
        for index, fields in enumerate(wanted)
    ]


def batch_logits(scale: float) -> torch.Tensor:
    rows = len(mixed_batch())
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * scale


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_alone_as_in_a_batch(scale: float) -> None:
    logits, batch = batch_logits(scale).cuda(), mixed_batch()
    together = sample_all(logits, batch)
    for row, new in enumerate(batch):
        assert sample_all(logits[row : row + 1], [new]) == [together[row]]


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_tokens_equal_those_of_the_cpu(scale: float) -> None:
    # Both devices draw the same numbers; exp differs in the last bits, which moves no draw of these seeds.
    logits, batch = batch_logits(scale), mixed_batch()
    on_cpu, on_gpu = sample_all(logits, batch), sample_all(logits.cuda(), batch)
    assert [token_id for token_id, _ in on_gpu] == [token_id for token_id, _ in on_cpu]
    for (_, expected), (_, found) in zip(on_cpu, on_gpu, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert found.token_ids == expected.token_ids
            assert found.ranks == expected.ranks
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_cost_only_their_own_row(temperature: float) -> None:
    logits = torch.zeros(2, 100, device="cuda")
    logits[1, 50] = float("nan")
    batch = [new_request(name, params(temperature=temperature)) for name in ("first", "second")]
    found = sample_all(logits, batch)
    assert found[0][0] is not None
    assert found[1] == (None, None)
