import os
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest

from quire.errors import ContextLengthError, InvalidParameterError, ModelFileError
from quire.sampling_params import SamplingParams
from quire.server.front_end import ENCODER_NICENESS, FrontEnd
from quire.structured_outputs import StructuredOutputsParams
from quire.text.tokenizer import LONG_TEXT
from tests.engine.builders import EOS, VOCAB_SIZE, byte_tokenizer, make_config


def front_end(**changes: Any) -> FrontEnd:
    return FrontEnd(make_config(), byte_tokenizer(), changes.get("chat_template"))


def test_too_many_characters_are_refused_before_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    made = front_end()
    monkeypatch.setattr(made.tokenizer, "encode", lambda *args, **kwargs: pytest.fail("tokenised"))
    with pytest.raises(ContextLengthError, match="100000 characters"):
        made.prompt("x" * 100_000)


@pytest.mark.parametrize(
    ("asked", "max_tokens", "kept"), [(None, 5, None), (7, 5, 7), (-1, 28, 100), (-1, None, 127), (-1, 500, 1)]
)
def test_max_prompt_len_leaves_room_for_max_tokens(asked: int | None, max_tokens: int | None, kept: int | None) -> None:
    assert front_end().max_prompt_len(asked, max_tokens) == kept
    with pytest.raises(InvalidParameterError, match="at least 1"):
        front_end().max_prompt_len(0, max_tokens)


def test_structured_output_is_checked_without_compiling_it_here() -> None:
    made = front_end()
    form = StructuredOutputsParams(json={"type": "object"})
    made.prepare("r", made.prompt("a"), SamplingParams(structured_outputs=form))
    assert made.grammars.found(form) is None, "preparing does not wait for it"
    assert made.grammars.check(form) == made.grammars.found(form) != ""
    assert made.input_processor.grammars._kept.num_bytes == 0, "nothing was compiled"
    with pytest.raises(InvalidParameterError, match="unclosed group"):
        made.grammars.check(StructuredOutputsParams(regex="(a"))


@pytest.mark.parametrize(("vocab_size", "closed"), [(VOCAB_SIZE, 0), (EOS, 1)], ids=["some form", "none"])
def test_checker_process_is_closed_if_the_model_supports_no_structured_output(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, closed: int
) -> None:
    is_warm = threading.Event()
    num_closed: list[int] = []
    module = "quire.server.front_end."
    monkeypatch.setattr(module + "resolve_source", lambda *args, **kwargs: None)
    monkeypatch.setattr(module + "open_checkpoint", lambda *args, **kwargs: None)
    monkeypatch.setattr(module + "load_tokenizer", lambda *args: byte_tokenizer())
    monkeypatch.setattr(module + "GrammarChecker.warm_up", lambda self: is_warm.set())
    monkeypatch.setattr(module + "GrammarChecker.close", lambda self: num_closed.append(1))
    config = make_config()
    FrontEnd.load(replace(config, model=replace(config.model, vocab_size=vocab_size)), None)
    assert is_warm.wait(20)
    assert len(num_closed) == closed


def test_long_text_is_encoded_by_a_thread_of_low_priority() -> None:
    made = front_end()
    seen: list[tuple[str, int]] = []
    encode = made.tokenizer.encode

    def watched(text: str, **options: Any) -> list[int]:
        priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen.append((threading.current_thread().name, priority))
        return encode(text, **options)

    made.tokenizer.encode = watched  # type: ignore[method-assign]
    text = "a" * (LONG_TEXT + 1)
    assert made.prompt(text, max_len=2).token_ids == [97, 97]
    assert made.prompt("hi").token_ids == [104, 105]
    (long_name, long_nice), (short_name, short_nice) = seen
    assert long_name.startswith("quire-encode")
    assert short_name == threading.current_thread().name
    if sys.platform == "linux":
        assert long_nice >= short_nice
        assert long_nice >= ENCODER_NICENESS


def test_model_template_that_does_not_parse_fails_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "quire.server.front_end."
    broken = byte_tokenizer()
    broken.chat_templates["default"] = "{% for %}"
    monkeypatch.setattr(module + "resolve_source", lambda *args, **kwargs: None)
    monkeypatch.setattr(module + "open_checkpoint", lambda *args, **kwargs: None)
    monkeypatch.setattr(module + "load_tokenizer", lambda *args: broken)
    monkeypatch.setattr(module + "GrammarChecker.warm_up", lambda self: None)
    with pytest.raises(ModelFileError, match=r"'default' cannot be used.*line 1.*--chat-template FILE"):
        FrontEnd.load(make_config(), None)
    FrontEnd.load(make_config(), "{{ messages[0].content }}")
