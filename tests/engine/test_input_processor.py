from dataclasses import replace
from typing import Any

import msgspec
import pytest
import tokenizers

from quire.config import ModelConfig
from quire.engine.input_processor import InputProcessor, find_eos_token_ids, make_vocabulary
from quire.errors import ContextLengthError, InvalidParameterError, PromptError, RequestError
from quire.grammar.compiler import check_grammar
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler.request import Request
from quire.structured_outputs import StructuredOutputsParams
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_parts import TokenizerParts
from tests.engine.builders import EOS, VOCAB_SIZE, byte_tokenizer, make_config


def make(options: dict[str, Any] | None = None, **scheduler: Any) -> InputProcessor:
    return InputProcessor(make_config(options, **scheduler), byte_tokenizer(), clock=lambda: 7.0)


def request(processor: InputProcessor, prompt: Any = "hello", **params: Any) -> Request:
    return processor.prepare("r", prompt, SamplingParams(**params)).request


def test_text_is_tokenised_and_ids_are_kept() -> None:
    prepared = make().prepare("r", "hé", SamplingParams())
    assert prepared.prompt == "hé"
    assert prepared.request.prompt_token_ids == list("hé".encode())
    assert prepared.request.arrival_time_s == 7.0
    assert make().prepare("r", [5, 6], SamplingParams()).prompt is None


def test_special_tokens_in_text_are_recognised() -> None:
    assert request(make(), "a<eos>").prompt_token_ids == [97, EOS]


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_ids_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(PromptError, match=f"{token_id} is not in the vocabulary: ids are 0 … {VOCAB_SIZE - 1}"):
        request(make(), [1, token_id, 2])


def test_prompt_must_leave_room_for_one_token() -> None:
    processor = make(max_model_len=16)
    assert request(processor, [1] * 15, max_tokens=None).max_tokens == 1
    with pytest.raises(ContextLengthError, match=r"16 tokens, the context holds 16"):
        request(processor, [1] * 16)


def test_text_too_long_however_it_is_cut_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = make(max_model_len=16)
    monkeypatch.setattr(Tokenizer, "encode", lambda *arguments, **options: pytest.fail("tokenised"))
    # The longest token, <assistant>, has 11 characters.
    with pytest.raises(ContextLengthError, match="has 300 characters, so at least 28 tokens; the context holds 16"):
        request(processor, "a" * 300)


@pytest.mark.parametrize(("max_model_len", "can_be_raised"), [(16, True), (256, False)])
def test_raising_the_context_is_proposed_only_where_the_model_holds_more(
    max_model_len: int, can_be_raised: bool
) -> None:
    processor = make(max_model_len=max_model_len)
    calls = (
        lambda: request(processor, [1] * 257),
        lambda: request(processor, "a" * 10_000),
        lambda: processor.prepare("r", [1] * 257, PoolingParams()),
    )
    for call in calls:
        with pytest.raises(ContextLengthError, match="shorten the prompt") as caught:
            call()
        assert ("raise max_model_len" in caught.value.message) == can_be_raised


def test_max_tokens_ends_at_the_context() -> None:
    processor = make(max_model_len=16)
    assert request(processor, [1] * 10, max_tokens=None).max_tokens == 6
    assert request(processor, [1] * 10, max_tokens=5).max_tokens == 5
    assert request(processor, [1] * 10, max_tokens=1000).max_tokens == 6


def test_pooling_may_fill_the_context() -> None:
    processor = make(max_model_len=16)
    prepared = processor.prepare("r", [1] * 16, PoolingParams(pooling="mean"))
    assert prepared.request.spec.pooling == PoolingParams(pooling="mean")
    assert not prepared.request.spec.reads_prefix_cache
    assert processor.prepare("r", [1] * 16, PoolingParams()).request.spec.reads_prefix_cache
    with pytest.raises(ContextLengthError):
        processor.prepare("r", [1] * 17, PoolingParams())


def test_n_makes_siblings_with_neighbouring_seeds() -> None:
    leader = request(make(), n=3, seed=41, temperature=1.0)
    assert [sibling.spec.seed for sibling in leader.siblings] == [42, 43]
    assert leader.spec.seed == 41
    assert [sibling.request_id for sibling in leader.siblings] == ["r/1", "r/2"]
    assert all(sibling.prompt_token_ids == leader.prompt_token_ids for sibling in leader.siblings)


def test_largest_seed_wraps_for_siblings() -> None:
    leader = request(make(), n=2, seed=2**64 - 1)
    assert leader.siblings[0].spec.seed == 0


def test_n_beyond_max_num_seqs_is_refused_before_siblings_are_made() -> None:
    with pytest.raises(InvalidParameterError, match=r"max_num_seqs \(16\)"):
        request(make(), n=16384)


def test_engine_seeds_reproduce_and_differ() -> None:
    def seeds(engine_seed: int) -> list[int]:
        processor = make({"seed": engine_seed})
        return [request(processor).spec.seed for _ in range(100)]

    assert seeds(0) == seeds(0)
    assert len(set(seeds(0) + seeds(1))) == 200
    assert all(0 <= seed < 2**64 for seed in seeds(0))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_bounded_by_the_engine(field: str) -> None:
    request(make({"max_logprobs": 5}), **{field: 5})
    for value in (6, -1):
        with pytest.raises(InvalidParameterError, match=rf"{field} must be at most the engine's max_logprobs \(5\)"):
            request(make({"max_logprobs": 5}), **{field: value})
    request(make({"max_logprobs": -1}), **{field: -1})
    request(make({"max_logprobs": VOCAB_SIZE}), **{field: -1})


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [1, VOCAB_SIZE]},
        {"allowed_token_ids": [VOCAB_SIZE]},
        {"logit_bias": {VOCAB_SIZE: 1.0}},
    ],
)
def test_token_ids_in_parameters_are_in_the_vocabulary(params: dict[str, Any]) -> None:
    (field,) = params
    with pytest.raises(InvalidParameterError, match=f"{field} must be token ids in the vocabulary"):
        request(make(), **params)


def test_bad_words_are_banned_with_and_without_a_space() -> None:
    found = request(make(), bad_words=["no", " yes"]).spec.bad_words_token_ids
    assert found == ((110, 111), (32, 110, 111), (32, 121, 101, 115))


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    assert request(make()).spec.reads_prefix_cache
    assert not request(make(), prompt_logprobs=0).spec.reads_prefix_cache


def test_priority_needs_its_policy() -> None:
    with pytest.raises(InvalidParameterError, match="scheduling_policy='priority'") as caught:
        make().prepare("r", "hi", None, priority=1)
    assert caught.value.field == "priority"
    assert make(policy="priority").prepare("r", "hi", None, priority=-3).request.spec.priority == -3


@pytest.mark.parametrize(
    "arguments",
    [
        {"request_id": 3}, {"request_id": ""}, {"priority": 1.5}, {"priority": True}, {"client_id": None},
        {"cache_salt": 1}, {"params": {"temperature": 0}}, {"params": "greedy"}, {"arrival_time_s": "now"},
        {"arrival_time_s": float("nan")}, {"arrival_time_s": True}, {"deadline_s": 0}, {"deadline_s": -1.5},
        {"deadline_s": float("inf")}, {"deadline_s": float("nan")}, {"deadline_s": "soon"}, {"deadline_s": True},
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    arguments = {"request_id": "r", "prompt": "hi", "params": None} | arguments
    with pytest.raises(RequestError):
        make(policy="priority").prepare(**arguments)


def test_deadline_counts_from_the_arrival() -> None:
    times = {"arrival_time_s": 7.0, "deadline_s": 2.5}
    prepared = make().prepare("r", "hi", SamplingParams(n=2, temperature=1), **times)
    assert [item.spec.deadline_time_s for item in (prepared.request, *prepared.request.siblings)] == [9.5, 9.5]
    assert make().prepare("r", "hi", None).request.spec.deadline_time_s is None
    with pytest.raises(InvalidParameterError, match="deadline_s must be a finite number of seconds above 0"):
        make().prepare("r", "hi", None, deadline_s=0)


def test_salt_of_the_call_wins_over_the_prompts() -> None:
    processor = make()
    prompt = {"prompt": "hi", "cache_salt": "p"}
    assert processor.prepare("r", prompt, None).request.spec.hash_extras == ("p",)
    assert processor.prepare("r", prompt, None, cache_salt="c").request.spec.hash_extras == ("c",)


def test_defaults_come_from_the_generation_config() -> None:
    assert make().default_sampling_params == SamplingParams(temperature=0.5)
    assert make().prepare("r", "hi", None).request.sampling == SamplingParams(temperature=0.5)


def test_without_a_tokenizer_only_ids_go() -> None:
    processor = InputProcessor(make_config(), None)
    assert processor.prepare("r", [1, 2], None).request.prompt_token_ids == [1, 2]
    with pytest.raises(PromptError, match="no tokenizer"):
        processor.prepare("r", "hi", None)
    for params in ({"stop": "x"}, {"bad_words": ["x"]}, {"dry_multiplier": 1}):
        with pytest.raises(InvalidParameterError, match="no tokenizer"):
            processor.prepare("r", [1], SamplingParams(**params))


def test_dry_without_breakers_needs_no_tokenizer() -> None:
    params = SamplingParams(dry_multiplier=1, dry_sequence_breakers=[])
    assert InputProcessor(make_config(), None).prepare("r", [1], params).request.sampling == params


def test_ranks_refuse_logits_processors_by_name() -> None:
    params = SamplingParams(logits_processors=[lambda token_ids, logits: logits])
    assert make().prepare("r", "hi", params).request.sampling == params
    config = make_config()
    config = replace(config, options=replace(config.options, tensor_parallel_size=2))
    with pytest.raises(InvalidParameterError, match="left out with 2 ranks") as caught:
        InputProcessor(config, None).prepare("r", [1], params)
    assert caught.value.field == "logits_processors"


def test_form_is_compiled_when_it_is_prepared_and_not_before() -> None:
    processor = make()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]{3}"))
    _, made = processor.make_spec("r", "hello", params)
    assert (made.sampling, processor.grammars._kept.num_bytes) == (params, 0)
    assert processor.prepare("r", "hello", params).grammar is not None


def test_form_that_was_checked_elsewhere_is_not_checked_again() -> None:
    processor = make()
    grammar = check_grammar(StructuredOutputsParams(regex="[ab]{3}"))
    # Only what came from the check is looked at: this regex has no meaning.
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(("))
    _, made = processor.make_spec("r", "hello", params)
    spec = msgspec.structs.replace(made, checked_grammar=grammar)
    compiled = processor.complete(spec, streams=True).grammar
    assert compiled is not None
    assert compiled.start().allowed().tolist() == [97, 98]
    del compiled
    with pytest.raises(InvalidParameterError, match="unclosed group"):
        make().prepare("r", "hello", params)


def test_whether_texts_can_follow_a_grammar() -> None:
    make().check_grammars()
    with pytest.raises(InvalidParameterError, match="no tokenizer"):
        InputProcessor(make_config(), None).check_grammars()


def model_of(vocab_size: int, *eos_token_ids: int) -> ModelConfig:
    return replace(make_config().model, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


def end_tokenizer(*special: str, eos: str | None = None) -> Tokenizer:
    """Return a tokenizer of bytes whose special tokens begin at 256."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={chr(index): index for index in range(256)}, merges=[]))
    backend.add_special_tokens(list(special))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(TokenizerParts(backend, None, None if eos is None else backend.token_to_id(eos)))


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("special", "eos", "generation", "config", "expected"),
    [
        (CHATML, "<|im_end|>", (256,), 256, {256, 258}),  # each file names another end
        (CHATML, None, (256,), 256, {256, 258}),  # no file names the end of a turn
        (CHATML, None, (), None, {256, 258}),
        (CHATML, "<|im_end|>", (0,), 0, {256, 258}),  # the id is ordinary text here
        (CHATML, None, (10, 258), 0, {10, 256, 258}),  # a chosen one stays, another file's ordinary text does not
        (CHATML, None, (258,), [256, 257], {256, 257, 258}),
        (("<s>",), None, (10,), 10, {10}),  # there is no other end
        (("<s>", "</s>"), None, (), None, {257}),
    ],
)
def test_ends_of_a_text_are_those_of_all_files(
    special: tuple[str, ...], eos: str | None, generation: tuple[int, ...], config: Any, expected: set[int]
) -> None:
    model = replace(make_config().model, eos_token_ids=generation, hf_config={"eos_token_id": config})
    tokenizer = end_tokenizer(*special, eos=eos)
    assert find_eos_token_ids(model, tokenizer) == expected
    assert set(make_vocabulary(model, tokenizer).eos_token_ids) == expected
    assert find_eos_token_ids(model, None) == set(generation)


def test_end_that_is_ordinary_text_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config()
    config = replace(config, model=replace(config.model, eos_token_ids=(33,)))
    assert InputProcessor(config, end_tokenizer("<|im_end|>")).eos_token_ids == {256}
    assert "names token 33 as the end of a text, which is ordinary text" in caplog.text
    assert InputProcessor(replace(config, model=replace(config.model, vocab_size=100)), byte_tokenizer()).eos_token_ids


def test_vocabulary_has_one_entry_per_logit() -> None:
    tokenizer = byte_tokenizer()
    vocabulary = make_vocabulary(model_of(VOCAB_SIZE + 3, EOS, VOCAB_SIZE + 9), tokenizer)
    assert [vocabulary.tokens[97], vocabulary.tokens[255], vocabulary.tokens[VOCAB_SIZE]] == [b"a", b"\xff", b""]
    assert len(vocabulary.tokens) == VOCAB_SIZE + 3
    assert vocabulary.eos_token_ids == (EOS,)
    assert vocabulary.special_token_ids == tokenizer.special_token_ids
    assert list(vocabulary.encode("ab")) == [97, 98]


def test_vocabulary_of_fewer_logits_than_tokens() -> None:
    vocabulary = make_vocabulary(model_of(100, 5), byte_tokenizer())
    assert len(vocabulary.tokens) == 100
    assert max(vocabulary.special_token_ids, default=0) < 100


def test_vocabulary_that_can_follow_no_grammar_is_refused() -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    for tokenizer, end, says in (
        (None, 0, "no tokenizer"),
        (Tokenizer(TokenizerParts(words, None, 0)), 0, "not runs of bytes"),
        (end_tokenizer(), VOCAB_SIZE, "no end-of-sequence token"),
    ):
        with pytest.raises(InvalidParameterError, match=says):
            make_vocabulary(model_of(VOCAB_SIZE, end), tokenizer)
