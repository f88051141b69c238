import pytest

from quire.server.protocol.base import Body
from quire.server.protocol.chat import Message
from quire.server.protocol.validation import validate
from quire.server.routes.chat_job import add_generation_prompt, template_messages


@pytest.mark.parametrize(
    ("chosen", "continues", "expected"),
    [(None, False, True), (None, True, False), (False, False, False), (True, None, True), (False, True, False)],
)
def test_the_prompt_ends_with_the_assistants_turn_unless_a_message_is_continued(
    chosen: bool | None, continues: bool | None, expected: bool
) -> None:
    assert add_generation_prompt(chosen, continues) is expected


def test_templates_see_what_was_sent_and_always_some_content() -> None:
    class Messages(Body):
        messages: list[Message]

    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Ann"},
        {"role": "assistant", "content": None, "annotations": []},
    ]
    assert template_messages(validate(Messages, {"messages": sent}).messages) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]
