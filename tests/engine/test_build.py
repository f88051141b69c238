from pathlib import Path

import pytest

from quire import LLM, AsyncLLM
from quire.sampling_params import PoolingParams, SamplingParams
from tests.cli.tiny_directory import make_tiny_directory

PROMPTS = ["hello", "a longer prompt with some words", "ab" * 30, "x"]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("models") / "tiny")


def make_llm(directory: Path, **options: object) -> LLM:
    return LLM(str(directory), dtype="float32", **{"num_blocks_override": 64, "block_size": 4, **options})


def generate(llm: LLM, prompts: object, params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


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


def test_async_llm_builds_too(directory: Path) -> None:
    with AsyncLLM(str(directory), num_blocks_override=64, block_size=4) as llm:
        assert llm.is_running
    assert not llm.is_running


# --- The real model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path), dtype="float32", max_model_len=512, num_blocks_override=200)


@pytest.mark.model
def test_the_capital_of_france(smollm2: LLM) -> None:
    (output,) = smollm2.generate(
        "The capital of France is", SamplingParams(temperature=0, max_tokens=10), use_tqdm=False
    )
    assert output.outputs[0].text.startswith(" Paris")


@pytest.mark.model
def test_a_chat_ends_by_itself_with_whole_text(smollm2: LLM) -> None:
    messages = [{"role": "user", "content": "Answer with one word: what colour is the sky?"}]
    (output,) = smollm2.chat(messages, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.finish_reason == "stop"
    assert "<|im_end|>" not in completion.text
    assert completion.text.strip()
    shown = smollm2.get_tokenizer().decode(completion.token_ids)
    assert completion.text == shown


@pytest.mark.model
def test_a_stop_string_in_real_text(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop=["aris"])
    (output,) = smollm2.generate("The capital of France is", params, use_tqdm=False)
    assert output.outputs[0].text == " P"
    assert output.outputs[0].stop_reason == "aris"
