"""`LLM.sleep` and `wake_up`: memory is freed, and the model answers as before."""

import weakref
from pathlib import Path

import pytest

from quire import LLM
from quire.errors import EngineDeadError, RequestError
from quire.sampling_params import SamplingParams
from tests.cli.tiny_directory import make_tiny_directory


def test_model_that_slept_gives_the_same_tokens(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    with LLM(str(make_tiny_directory(tmp_path)), dtype="float32", num_blocks_override=64, block_size=4) as llm:
        worker = weakref.ref(llm.llm_engine._executor._worker)
        (before,) = llm.generate("hello", params, use_tqdm=False)
        with pytest.raises(RequestError, match="level must be 1 or 2"):
            llm.sleep(level=3)
        for _ in range(2):
            llm.sleep()
            assert llm.is_sleeping()
        assert worker() is None, "weights and KV cache are freed"
        with pytest.raises(EngineDeadError, match="wake_up"):
            llm.generate("hello", params, use_tqdm=False)
        for _ in range(2):
            llm.wake_up()
        (after,) = llm.generate("hello", params, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert not llm.is_sleeping()
