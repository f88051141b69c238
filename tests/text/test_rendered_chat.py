"""Text of messages never becomes a special token; other text is encoded as before."""

from typing import Any

import pytest
from hypothesis import given

from quire.errors import ChatTemplateError
from quire.text.chat_template import RenderedChat, SpecialTokenMarks
from quire.text.dialogue import Dialogue, DialogueOptions
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_parts import TokenizerParts, add_bos_and_eos
from tests.text.builders import SPECIAL_TOKENS, TEXTS, byte_level_backend, sentencepiece_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message.content }}{{ message.name }}<|end|>{% endfor %}"
    "{{ tools | tojson if tools }}{{ greeting }}"
)


def make_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    parts = TokenizerParts(byte_level_backend(), None, 0, chat_templates={"default": template})
    return Tokenizer(parts)


def render(tokenizer: Tokenizer, messages: Any, tools: Any = None, **options: Any) -> RenderedChat:
    rendered: list[RenderedChat] = []
    dialogue = Dialogue(tokenizer.chat_templates, tokenizer)
    dialogue.prepare(messages, tools, DialogueOptions(**options), encode=lambda chat: rendered.append(chat) or [])
    return rendered[0]


def special_ids(tokenizer: Tokenizer, messages: Any, **options: Any) -> list[int]:
    chat = render(tokenizer, messages, **options)
    ids = tokenizer.encode_chat(chat)
    assert tokenizer.decode(ids, skip_special_tokens=False) == chat.text
    return [token_id for token_id in ids if token_id in tokenizer.special_token_ids]


def user(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **fields}]


USUAL = special_ids(make_tokenizer(), user("hello"))


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (lambda token: user(f"a{token}b"), {}),
        (lambda token: user(token), {}),
        (lambda token: user(token * 3), {}),
        (lambda token: user(token[:3] + token + token[3:]), {}),
        (lambda token: user([{"type": "text", "text": f"a{token}"}]), {}),
        (lambda token: user("a", name=token), {}),
        (lambda token: user("a"), {"tools": [{"function": {"name": "{}", "{}": "{}"}}]}),
        (lambda token: user("a"), {"variables": {"greeting": ["{}", {"b": "{}"}]}}),
    ],
)
def test_special_tokens_in_values_of_clients_are_text(token: str, messages: Any, options: dict[str, Any]) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("{}", token)
        if isinstance(value, dict):
            return {filled(name): filled(item) for name, item in value.items()}
        return [filled(item) for item in value]

    assert special_ids(make_tokenizer(), messages(token), **filled(options)) == USUAL


@given(TEXTS)
def test_any_message_keeps_its_characters_and_the_special_tokens_of_the_template(text: str) -> None:
    tokenizer = make_tokenizer()
    assert special_ids(tokenizer, user(text)) == USUAL
    chat = render(tokenizer, user(text))
    assert chat.text == f"<|user|>{text}<|end|>"
    if not any(token in text for token in SPECIAL_TOKENS):
        assert chat.pieces == (chat.text,)


def test_value_that_is_nested_too_deep_is_refused() -> None:
    nested: Any = "<|end|>"
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="recursion"):
        render(make_tokenizer(), user("a", extra=nested))
    marks = make_tokenizer().marks
    with pytest.raises(ChatTemplateError, match="nested too deep"):
        marks.render(lambda marked: str(marked(nested)))


def test_final_message_with_a_special_token_is_continued() -> None:
    tokenizer = make_tokenizer("{{ messages[0].content }}<|end|>")
    chat = render(tokenizer, user("a<|end|>b"), continue_final_message=True)
    assert chat.pieces == ("a<", "|end|>b")


def test_overlapping_tokens_are_all_cut() -> None:
    marks = SpecialTokenMarks(["ab", "bc", "abcd", "x"])
    assert marks.render(lambda marked: marked("zabcdx")).pieces == ("za", "b", "cdx")
    assert SpecialTokenMarks([]).render(lambda marked: marked("ab")) == RenderedChat(("ab",))


def test_bos_and_eos_go_around_all_pieces() -> None:
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(byte_level_backend().to_str())
    add_bos_and_eos(backend, bos="<|user|>", eos="<|end|>")
    tokenizer = Tokenizer(TokenizerParts(backend, 1, 0))
    ids = tokenizer.encode_chat(RenderedChat(("a<", "|end|>b")), add_special_tokens=True)
    assert (ids[0], ids[-1]) == (1, 0)
    assert tokenizer.decode(ids) == "a<|end|>b"


def test_special_tokens_of_a_message_are_text_with_sentencepiece() -> None:
    tokenizer = sentencepiece_tokenizer()
    chat = render(tokenizer, user("a</s>b"), chat_template="{{ messages[0].content }}</s>")
    ids = tokenizer.encode_chat(chat)
    assert [token_id for token_id in ids if token_id in tokenizer.special_token_ids] == [2]
    assert chat.text == "a</s>b</s>"
