"""`quire run`: text on stdout, statistics on stderr, JSON, and which errors come before the model is loaded."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli import chat
from quire.errors import ConfigError, ModelNotFoundError
from quire.outputs import RequestOutput
from tests.cli.command_line import CHAT_TEMPLATE, FakeEngine, call, parsed
from tests.cli.tiny_directory import make_tiny_directory
from tests.engine.builders import EOS
from tests.hostile_files import HOSTILE


def test_json_is_one_object_and_quiet_has_no_notes(engines: list[FakeEngine]) -> None:
    for arguments in (["--json", "-q", "run", "Hi there"], ["run", "Hi there", "--json", "-q"]):
        result = call(*arguments)
        assert result.stderr == ""
        value = parsed(result)
        assert value["schema"] == "quire.run/1"
        assert value["text"] == "Because."
        assert value["token_ids"] == [*b"Because.", EOS]
        assert (value["finish_reason"], value["stop_reason"]) == ("stop", None)
        assert (value["num_prompt_tokens"], value["num_generated_tokens"], value["num_cached_tokens"]) == (15, 9, 0)
        assert value["timings"]["time_to_first_token_s"] >= 0
        assert len(value["completions"]) == 1


def test_empty_prompt_is_an_error_before_the_model_is_loaded(engines: list[FakeEngine]) -> None:
    assert call("run", "Hi there", "--raw", "--system", "x").exit_code == 2
    for arguments in (["run", ""], ["run", "smollm2", ""]):
        result = call(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == "error[invalid_prompt]: the prompt is empty: give at least one character\n"
    assert not engines


def test_piped_input_is_the_prompt_or_comes_before_it(engines: list[FakeEngine]) -> None:
    assert call("run", stdin="Hi there\n").exit_code == 0
    assert call("run", "smollm2", stdin="Hi there\n").exit_code == 0
    assert call("run", "smollm2", "-", stdin="Hi there\n").exit_code == 0
    assert call("run", "there", "--model", "smollm2", stdin="Hi\n").exit_code == 0
    assert engines.pop().prompts[0]["prompt"] == "user: Hi\n\nthere\n"
    assert {engine.prompts[0]["prompt"] for engine in engines} == {"user: Hi there\n"}


def test_flags_reach_the_request(engines: list[FakeEngine]) -> None:
    call("run", "Hi there", "--temperature", "0", "--max-tokens", "3", "--seed", "7", "--stop", "x")
    params = engines[0].params[0]
    assert (params.temperature, params.max_tokens, params.seed, params.stop_strings) == (0, 3, 7, ("x",))
    assert engines[0].config.options.seed == 7
    call("run", "Hi there", "--system", "Be brief.")
    call("run", "Once upon", "--raw")
    assert engines[1].prompts[0]["prompt"] == "system: Be brief.\nuser: Hi there\n"
    assert engines[2].prompts[0] == {"prompt": "Once upon"}


THINKS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ enable_thinking }}<think>\n"


def answering(text: str, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engines of `run` answer with a text, with a chat template."""
    monkeypatch.setattr("tests.cli.command_line.CHAT_TEMPLATE", template)
    monkeypatch.setattr("tests.cli.command_line.ANSWER", text)


def test_reasoning_is_apart_from_the_answer(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    answering("Hm.</think>\n\nFour.", THINKS, monkeypatch)
    result = call("run", "2 and 2", "--reasoning-effort", "none")
    assert result.stdout == "Four.\n"
    assert "Hm." in result.stderr
    assert engines[0].prompts[0]["prompt"].endswith("False<think>")
    message = parsed(call("run", "2 and 2", "--json"))["completions"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Four.")
    call("run", "2 and 2", "--reasoning-budget", "9")
    assert engines[-1].params[0].structured_outputs.reasoning.budget == 9


def test_calls_of_tools_are_read(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering('{"name": "clock", "arguments": {"zone": "UTC"}}', CHAT_TEMPLATE, monkeypatch)
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "clock", "description": "the time"}}]')
    result = call("run", "What time is it?", "--tools", str(tools))
    assert (result.stdout.strip(), result.exit_code) == ("", 0)
    assert 'clock {"zone": "UTC"}' in result.stderr
    assert "the time" in engines[0].prompts[0]["prompt"]
    message = parsed(call("run", "What time is it?", "--tools", str(tools), "--json"))["completions"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": '{"zone": "UTC"}'}
    tools.write_text("{}")
    assert "must hold a JSON list of tools" in call("run", "What time is it?", "--tools", str(tools)).stderr
    assert "cannot be read" in call("run", "What time is it?", "--tools", "missing.json").stderr
    assert len(engines) == 2


RUN_TRUNCATED = """
import os, sys
from quire.cli.main import main
from quire.runtime.plan.packed_weights import PackedWeights

def truncate(weights, *arguments):
    os.truncate(sys.argv[2] + "/model.safetensors", 0)
    fill(weights, *arguments)

fill, PackedWeights.fill = PackedWeights.fill, truncate
main()
"""


def test_model_file_that_is_truncated_while_it_is_mapped_is_named(tmp_path: Path) -> None:
    model = make_tiny_directory(tmp_path / "model")
    command = [sys.executable, "-c", RUN_TRUNCATED, "run", str(model), "hi"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (-signal.SIGBUS, "")
    assert result.stderr.splitlines()[-1].startswith(f"quire: {model}/model.safetensors: a page of this mapped file")
    assert "Traceback" not in result.stderr


def test_saved_chat_that_another_user_may_have_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for reason, spoil in HOSTILE.items():
        spoil(chat.save_chat("mine", [{"role": "user", "content": "one"}]))
        with pytest.raises(ConfigError, match=rf"mine\.json cannot be read: {reason}"):
            chat.load_chat("mine")


def test_continue_goes_on_with_the_chat_saved_last(
    engines: list[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    result = call("run", "--continue")
    assert (result.exit_code, "no chat is saved yet" in result.stderr) == (2, True)
    chat.save_chat("last", [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}])
    for more in (["Hi there"], ["--system", "x"], ["-f", "x"], ["--raw"]):
        assert call("run", "--continue", *more).exit_code == 2
    assert not engines
    assert call("run", "--continue", stdin="two\n").exit_code == 0
    assert engines[0].prompts[0]["prompt"] == "user: one\nassistant: 1\nuser: two\n"
    assert [message["content"] for message in chat.load_chat("last")] == ["one", "1", "two", "Because."]


def test_file_is_the_prompt_of_one_answer(engines: list[FakeEngine], tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("Why?\n")
    assert call("run", "-f", str(tmp_path / "q.txt")).exit_code == 0
    assert call("run", "smollm2", "Sum up.", "--file", str(tmp_path / "q.txt")).exit_code == 0
    assert [engine.prompts[0]["prompt"] for engine in engines] == ["user: Why?\n", "user: Why?\n\nSum up.\n"]


def test_several_completions_are_numbered(engines: list[FakeEngine]) -> None:
    result = call("run", "Hi there", "--n", "2")
    assert result.stdout == "[1/2]\nBecause.\n[2/2]\nBecause.\n"
    assert [item["index"] for item in parsed(call("run", "Hi there", "--n", "2", "--json"))["completions"]] == [0, 1]


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_what_was_generated_and_exits_130(
    as_json: bool, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = iter(range(100)), FakeEngine.step

    def step_with_interrupt(engine: FakeEngine) -> list[RequestOutput]:
        if next(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(FakeEngine, "step", step_with_interrupt)
    result = call("run", "Hi there", *(["--json"] if as_json else []))
    assert result.exit_code == 130
    assert "[interrupted]" in result.stderr
    if as_json:
        assert (parsed(result)["text"], parsed(result)["finish_reason"]) == ("Bec", "abort")
    else:
        assert result.stdout == "Bec\n"


def test_unknown_single_word_suggests_the_prompt_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise ModelNotFoundError("no model 'hello'")

    monkeypatch.setattr("quire.cli.run.open_engine", fail)
    result = call("run", "hello", stdin="x")
    assert result.exit_code == 3
    assert "no model 'hello'; to use it as the prompt: quire run smollm2 'hello'" in result.stderr


@pytest.mark.model
def test_default_model_answers(smollm2_path: Path) -> None:
    # In float32: the first token of this answer leads by less than 0.1 nats, which is within bfloat16's rounding.
    result = call(
        *("run", str(smollm2_path), "What is the capital of France?", "--temperature", "0", "--dtype", "float32")
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "The capital of France is Paris.\n"
    assert "[stop] prompt 37 tok · 8 new" in result.stderr
