import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from quire.engine.adapters import LoRARequest
from quire.engine.llm import LLM, open_progress_bar
from quire.errors import (
    ChatTemplateError,
    EngineDeadError,
    InvalidParameterError,
    MemoryCapacityError,
    PromptError,
    RequestError,
)
from quire.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from tests.engine.builders import ScriptedExecutor, assert_all_home, make_engine, saying


def make(*arguments: Any, **options: Any) -> tuple[LLM, ScriptedExecutor]:
    engine, executor = make_engine(*arguments, **options)
    return LLM.from_engine(engine), executor


def generate(llm: LLM, *arguments: Any, **options: Any) -> list[Any]:
    return llm.generate(*arguments, use_tqdm=False, **options)


def test_results_have_the_order_of_the_prompts() -> None:
    llm, _ = make(max_num_seqs=3)
    prompts = [f"prompt number {i}" for i in range(20)]
    params = [SamplingParams(max_tokens=1 + (7 * i) % 11, seed=i) for i in range(20)]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [item.max_tokens for item in params]
    assert_all_home(llm.llm_engine)


@pytest.mark.parametrize(
    ("prompts", "params", "error", "says"),
    [
        (["a", "b"], [SamplingParams()], RequestError, "1 entries for 2 prompts"),
        ("a", "greedy", RequestError, "str"),
        ("a", {"temperature": 0}, RequestError, "dict"),
        (["a"], [None], RequestError, "NoneType"),
        (["a", ""], None, PromptError, "empty"),
        (["a", 3], None, PromptError, "int"),
        (["a", [1, 999]], None, PromptError, "999"),
        (["a"], SamplingParams(n=2, temperature=0), InvalidParameterError, "n must be 1"),
        (["a", "b" * 300], None, RequestError, "context"),
    ],
)
def test_everything_is_checked_before_anything_runs(prompts: Any, params: Any, error: type, says: str) -> None:
    llm, executor = make()
    with pytest.raises(error, match=says):
        generate(llm, prompts, params)
    assert executor.num_steps == 0
    assert_all_home(llm.llm_engine)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("generate", {"sampling_params": SamplingParams(max_tokens=1)}),
        ("beam_search", {"params": BeamSearchParams(beam_width=1, max_tokens=1)}),
        ("encode", {}),
        ("embed", {}),
    ],
)
def test_list_of_adapters_may_have_none_for_prompts_of_the_base(call: str, options: dict[str, Any]) -> None:
    llm, executor = make()
    run = partial(getattr(llm, call), use_tqdm=False, **options)
    for wrong, says in ((["sql"], "LoRARequest or a list"), ([None, None], "2 entries for 1 prompts")):
        with pytest.raises(RequestError, match=says):
            run(["a"], lora_request=wrong)
    with pytest.raises(RequestError, match="start it with --enable-lora"):
        run(["a", "b"], lora_request=[None, LoRARequest("sql", "nowhere")])
    assert executor.num_steps == 0
    assert len(run(["a", "b"], lora_request=[None, None])) == 2


def test_prompt_that_can_never_fit_takes_the_others_along() -> None:
    llm, executor = make(num_blocks=8)
    with pytest.raises(MemoryCapacityError):
        generate(llm, ["a", "b" * 100])
    assert executor.num_steps == 0
    llm.llm_engine.step()
    assert_all_home(llm.llm_engine)


def test_short_queue_is_fed_as_it_empties() -> None:
    llm, _ = make(max_num_waiting=1, max_num_seqs=2)
    outputs = generate(llm, [f"{i}" for i in range(9)], SamplingParams(max_tokens=3))
    assert [output.prompt for output in outputs] == [str(i) for i in range(9)]


def test_priorities() -> None:
    llm, _ = make(policy="priority", max_num_seqs=1)
    outputs = generate(llm, ["a", "b", "c"], SamplingParams(max_tokens=2), priority=[3, 2, 1])
    starts = [output.metrics.first_scheduled_time_s for output in outputs]
    assert starts == sorted(starts, reverse=True)
    generate(llm, "a", priority=5)
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        generate(llm, "a", priority=[1, 2])
    with pytest.raises(RequestError, match="scheduling_policy"):
        generate(make()[0], "a", priority=1)


@pytest.mark.parametrize("priority", ["high", 1.5, [None], [1.5]])
def test_wrong_priorities(priority: Any) -> None:
    llm, _ = make(policy="priority")
    with pytest.raises(RequestError, match="priority must be an integer"):
        generate(llm, ["a"], priority=priority)


def test_outputs_end_at_their_deadlines_as_they_are() -> None:
    llm, executor = make()
    engine, now_s = llm.llm_engine, [0.0]
    engine._clock = engine.input_processor._clock = lambda: now_s[0]
    executor.in_step = lambda step: now_s.__setitem__(0, float(step))
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    outputs = generate(llm, ["a", "b", "c"], params, deadline_s=[3, None, 0.5])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 9, 1]
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "length", "abort"]
    assert [output.outputs[0].error_code for output in outputs] == ["deadline_passed", None, "deadline_passed"]
    assert "deadline_s" in str(outputs[0].outputs[0].error)
    assert_all_home(engine)
    assert generate(llm, "a", params, deadline_s=4)[0].outputs[0].finish_reason == "abort"
    for wrong, says in ([1, 2, 3], "3 entries for 1 prompts"), ([-1], "above 0"), ("soon", "above 0"):
        with pytest.raises(RequestError, match=says):
            generate(llm, "a", params, deadline_s=wrong)


# --- Chat -------------------------------------------------------------------------------------


MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat_renders_the_template_without_adding_special_tokens() -> None:
    llm, _ = make(saying("hello"))
    (output,) = llm.chat(MESSAGES, use_tqdm=False)
    assert output.prompt == "<user>hi<assistant>"
    assert output.prompt_token_ids == [257, 104, 105, 258]
    assert output.outputs[0].text == "hello"


def test_chat_takes_many_conversations() -> None:
    llm, _ = make()
    outputs = llm.chat([MESSAGES, [{"role": "user", "content": "yo"}]], use_tqdm=False)
    assert [output.prompt for output in outputs] == ["<user>hi<assistant>", "<user>yo<assistant>"]


def test_chat_templates_come_from_the_call_then_the_engine_then_the_model() -> None:
    llm, _ = make()
    llm.llm_engine.chat_template = "engine {{ messages[0]['content'] }}"
    assert llm.chat(MESSAGES, use_tqdm=False)[0].prompt == "engine hi"
    (output,) = llm.chat(
        MESSAGES, use_tqdm=False, chat_template="{{ word }} {{ messages[0]['content'] }}",
        chat_template_kwargs={"word": "call"},
    )  # fmt: skip
    assert output.prompt == "call hi"


def test_chat_may_continue_the_last_message() -> None:
    llm, _ = make()
    messages = [*MESSAGES, {"role": "assistant", "content": "I am"}]
    (output,) = llm.chat(messages, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt.endswith("I am")
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        llm.chat(messages, use_tqdm=False, continue_final_message=True)


def test_template_variables_cannot_replace_arguments() -> None:
    with pytest.raises(RequestError, match="'tools'"):
        make()[0].chat(MESSAGES, use_tqdm=False, chat_template_kwargs={"tools": []})


@pytest.mark.parametrize("messages", [[], "hi", None, {"role": "user", "content": "hi"}, ["hi"], [[]]])
def test_wrong_messages(messages: Any) -> None:
    llm, executor = make()
    with pytest.raises((PromptError, ChatTemplateError)):
        llm.chat(messages, use_tqdm=False)
    assert executor.num_steps == 0


@pytest.mark.parametrize(
    "arguments", [{"chat_template": 5}, {"chat_template_kwargs": "x"}, {"chat_template_kwargs": {1: 2}}]
)
def test_wrong_template_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(arguments))} must be"):
        make()[0].chat(MESSAGES, use_tqdm=False, **arguments)


# --- Embeddings -------------------------------------------------------------------------------


def test_encode_and_embed() -> None:
    llm, _ = make()
    outputs = llm.encode(["abc", "de"], use_tqdm=False)
    assert [output.outputs.embedding for output in outputs] == [[3.0, 99.0], [2.0, 101.0]]
    assert llm.embed("abc", use_tqdm=False)[0].outputs.embedding == [3.0, 99.0]
    llm.encode(["a", "b"], [PoolingParams(), PoolingParams(pooling="mean")], use_tqdm=False)
    with pytest.raises(RequestError, match="PoolingParams"):
        llm.encode("a", SamplingParams(), use_tqdm=False)  # type: ignore[arg-type]
    assert_all_home(llm.llm_engine)


# --- Progress, interrupts, failure ------------------------------------------------------------


def test_progress_bar_of_ones_own() -> None:
    calls: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            calls.append(options["total"])

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            assert "tok/s" in text

        def update(self, count: int) -> None:
            calls.append(count)

        def close(self) -> None:
            calls.append("closed")

    make()[0].generate(["a", "b", "c"], use_tqdm=Bar)
    assert calls == [3, 1, 1, 1, "closed"]


def test_bar_is_tqdms_on_stderr_or_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for use_tqdm in (False, True):
        with open_progress_bar(use_tqdm, 2) as advance:
            advance(10, 20)
            advance(1, 2)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert ("Prompts" in captured.err, "2/2" in captured.err) == (use_tqdm, use_tqdm)


def test_ctrl_c_ends_everything_between_steps_and_leaves_the_model_usable() -> None:
    llm, executor = make()

    def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    executor.in_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b", "c"], SamplingParams(max_tokens=50))
    assert executor.num_steps == 3, "the step was finished"
    executor.in_step = lambda step: None
    assert not llm.llm_engine.scheduler.has_unfinished
    (output,) = generate(llm, "a", SamplingParams(max_tokens=4))
    assert len(output.outputs[0].token_ids) == 4
    assert_all_home(llm.llm_engine)


def test_second_thread_is_refused_and_the_first_one_finishes() -> None:
    llm, executor = make()
    refused: list[BaseException] = []

    def call_again(step: int) -> None:
        if step == 2:
            with ThreadPoolExecutor() as pool:
                generating = pool.submit(generate, llm, "b")
                searching = pool.submit(llm.beam_search, "b", BeamSearchParams(beam_width=2, max_tokens=2))
            refused.extend(error for error in (generating.exception(), searching.exception()) if error)

    executor.in_step = call_again
    (output,) = generate(llm, "a", SamplingParams(max_tokens=4))
    assert len(output.outputs[0].token_ids) == 4
    assert [type(error) for error in refused] == [RequestError, RequestError]
    assert "busy with another call" in str(refused[0])
    assert_all_home(llm.llm_engine)


def test_dead_engine_raises_with_its_cause() -> None:
    llm, executor = make()

    def fail(step: int) -> None:
        raise ZeroDivisionError("kernel")

    executor.in_step = fail
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="kernel") as caught:
            generate(llm, ["a", "b", "c"])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_shutdown_at_the_end_of_with() -> None:
    llm, executor = make()
    with llm:
        generate(llm, "a")
    assert executor.is_shut_down
    with pytest.raises(EngineDeadError, match="shut down"):
        generate(llm, "a")
