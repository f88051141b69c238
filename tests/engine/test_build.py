import weakref
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM
from quire.errors import EngineDeadError, RequestError
from quire.sampling_params import PoolingParams, SamplingParams
from tests.cli.tiny_directory import make_tiny_directory

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("models") / "tiny")


def make_llm(directory: Path, **options: object) -> LLM:
    return LLM(str(directory), dtype="float32", **{"num_blocks_override": 64, "block_size": 4, **options})


def test_all_interfaces_on_a_tiny_model(directory: Path) -> None:
    with make_llm(directory) as llm:
        (output,) = llm.generate("hello", SamplingParams(max_tokens=5, logprobs=2), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 5
        assert all(len(position) in (2, 3) for position in output.outputs[0].logprobs)
        (answer,) = llm.chat(MESSAGES, SamplingParams(max_tokens=3), use_tqdm=False)
        assert answer.prompt == "<user>hi<a>"
        for pooling in ("last", "mean"):
            (vector,) = llm.embed("hello", pooling_params=PoolingParams(pooling=pooling), use_tqdm=False)
            assert sum(value**2 for value in vector.outputs.embedding) == pytest.approx(1, abs=1e-5)
        assert len(vector.outputs.embedding) == 16


def test_model_that_slept_gives_the_same_tokens(directory: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    with make_llm(directory) as llm:
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


def test_async_llm_builds_too(directory: Path) -> None:
    with AsyncLLM(str(directory), num_blocks_override=64, block_size=4) as llm:
        assert llm.is_running
    assert not llm.is_running
