from dataclasses import replace

import pytest

from quire.config import EngineOptions
from quire.step_memory import CPU_RESERVE_BYTES, GPU_RESERVE_BYTES, PROMPT_LOGPROB_ROWS, bytes_beside
from tests.test_resolve import MODEL


@pytest.mark.parametrize(("device", "reserve"), [("cpu", CPU_RESERVE_BYTES), ("cuda:0", GPU_RESERVE_BYTES)])
def test_it_grows_with_tokens_rows_and_widths(device: str, reserve: int) -> None:
    def found(num_tokens: int = 100, max_num_seqs: int = 8, **model: object) -> int:
        options = EngineOptions(max_num_seqs=max_num_seqs)
        return bytes_beside(options, replace(MODEL, **model), device, "bfloat16", num_tokens) - reserve  # type: ignore

    assert found() > 0
    # One step's hidden states, and the logits of its rows.
    assert found(200) - found(100) >= 100 * MODEL.hidden_size * 4
    assert found(max_num_seqs=1001) - found(max_num_seqs=1000) >= MODEL.vocab_size * 4
    assert found(hf_config={"intermediate_size": 100_000}) > found()
    assert found(num_heads=1000) > found()


def test_on_a_cpu_there_is_always_room_for_a_slice_of_a_prompts_logits() -> None:
    many, few = (bytes_beside(EngineOptions(max_num_seqs=n), MODEL, "cpu", "float32", 16) for n in (256, 1))
    assert many == few > PROMPT_LOGPROB_ROWS * MODEL.vocab_size * 4
