from pathlib import Path

import pytest

from quire import LLM, AsyncLLM, LLMEngine
from quire.config import EngineOptions
from quire.engine.build import build_engine
from quire.engine.tokenizer_source import read_chat_template
from quire.errors import ConfigError, ModelNotFoundError
from quire.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
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


def test_an_engine_from_a_directory_says_where_its_time_went(directory: Path) -> None:
    engine = build_engine(EngineOptions(model=str(directory)))
    assert engine.config.model.architecture == "LlamaForCausalLM"
    assert engine.get_tokenizer().decode(engine.get_tokenizer().encode("hé")) == "hé"
    times = engine.startup_times
    assert list(times) == ["source", "checkpoint", "decisions", "weights and cache", "tokenizer (beside)", "total"]
    in_turn = sum(seconds for name, seconds in times.items() if name not in ("total", "tokenizer (beside)"))
    assert 0 < in_turn <= times["total"]


def test_driving_steps_by_hand(directory: Path) -> None:
    engine = LLMEngine.from_options(str(directory), num_blocks_override=64, multi_step_decode=1)
    engine.add_request("a", "hello", SamplingParams(max_tokens=3, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]


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


def test_batched_chunked_preempted_and_cached_are_the_same_as_alone(directory: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    with make_llm(directory) as llm:
        alone = [generate(llm, prompt, params)[0] for prompt in PROMPTS]
        assert generate(llm, PROMPTS, params) == alone, "batched, and from the prefix cache"
    for options in ({"max_num_batched_tokens": 7, "max_num_seqs": 4}, {"num_blocks_override": 25}):
        with make_llm(directory, **options) as llm:
            assert generate(llm, PROMPTS, params) == alone, options


def test_n_is_the_same_as_separate_requests(directory: Path) -> None:
    with make_llm(directory) as llm:
        params = {"temperature": 1.0, "max_tokens": 12}
        together = generate(llm, PROMPTS, SamplingParams(n=3, seed=5, **params))
        for index in range(3):
            separate = generate(llm, PROMPTS, SamplingParams(seed=5 + index, **params))
            assert [completions[index] for completions in together] == [completions[0] for completions in separate]


def test_prompt_logprobs_are_the_logprobs_of_generating_the_prompt(directory: Path) -> None:
    with make_llm(directory) as llm:
        params = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)
        (generated,) = llm.generate("hello", params, use_tqdm=False)
        whole = generated.prompt_token_ids + generated.outputs[0].token_ids
        (read,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        for position, token_id in enumerate(generated.outputs[0].token_ids):
            of_prompt = read.prompt_logprobs[len(generated.prompt_token_ids) + position]
            assert of_prompt[token_id].logprob == pytest.approx(
                generated.outputs[0].logprobs[position][token_id].logprob, abs=1e-4
            )


def test_beams_are_the_same_as_beams_from_separate_runs(directory: Path) -> None:
    width, max_tokens = 3, 6
    with make_llm(directory) as llm:
        prompt = llm.get_tokenizer().encode("hello")
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width)
        live: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(max_tokens):
            outputs = llm.generate([prompt + tokens for _, tokens in live], params, use_tqdm=False)
            found = [
                (total + item.logprob, [*tokens, token_id])
                for (total, tokens), output in zip(live, outputs, strict=True)
                for token_id, item in output.outputs[0].logprobs[0].items()
            ]
            live = sorted(found, key=lambda item: -item[0])[:width]
        beam_params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True)
        (output,) = llm.beam_search([prompt], beam_params)
        assert [sequence.token_ids for sequence in output.sequences] == [tokens for _, tokens in live]
        for sequence, (total, _) in zip(output.sequences, live, strict=True):
            assert sequence.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_chat_templates_from_text_and_from_a_file(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("file: {{ messages[0].content }}")
    for option, expected in (("text: {{ messages[0].content }}", "text: hi"), (str(file), "file: hi")):
        with make_llm(directory, chat_template=option) as llm:
            assert llm.chat(MESSAGES, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt == expected
    assert read_chat_template(None) is None
    with pytest.raises(ConfigError, match="neither a Jinja template nor a readable file"):
        read_chat_template(str(tmp_path / "missing.jinja"))


def test_another_tokenizer(directory: Path, tmp_path: Path) -> None:
    for given in (directory, directory / "tokenizer.json"):
        with make_llm(directory, tokenizer=str(given)) as llm:
            assert llm.get_tokenizer().vocab_size == 258
    with pytest.raises(ConfigError, match="does not exist"):
        make_llm(directory, tokenizer=str(tmp_path / "missing"))


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelNotFoundError):
        LLM("./no-such-directory")


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
