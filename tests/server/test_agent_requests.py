"""Second requests of terminal coding agents, as recorded and reduced: all their fields, with texts of our own.

Each has read a picture and a file with NUL characters, which the conversation keeps.
"""

import json
from typing import Any

import pytest

from tests.engine.builders import saying
from tests.server.clients.running import LONG, TEMPLATE, text_of
from tests.server.fake_engine import MODEL, in_loop, make_server, requests_to, use_template

PICTURE = "iVBORw0KGgo="
FILE = "\x00\x01ELF \ud83d"
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
ASKED = {"type": "text", "text": "Read both."}

CLAUDE_CODE = {
    "model": MODEL,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>Skills: none</reminder>"}, ASKED]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Two files.", "signature": "c2ln"},
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "toolu_call_1", "name": "read", "input": {"path": "a"}},
            {"type": "tool_use", "id": "toolu_call_2", "name": "read", "input": {"path": "b"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_call_1", "content": FILE, "is_error": True},
            {"type": "tool_result", "tool_use_id": "toolu_call_2", "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}]},
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PICTURE},
             **EPHEMERAL},
        ]},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: version=1; entry=cli;"},
        {"type": "text", "text": "You are an agent.", **EPHEMERAL},
        {"type": "text", "text": "\nBe brief.", **EPHEMERAL},
    ],
    "tools": [{"name": "read", "description": "Read a file", "input_schema": PATH}],
    "metadata": {"user_id": '{"session_id": "1"}'},
    "max_tokens": 32000,
    "thinking": {"budget_tokens": 31999, "type": "enabled"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}  # fmt: skip


def message(role: str, text: str, **keys: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "id": "msg_1", "role": role, "content": [{"type": kind, "text": text, **keys}]}


CODEX = {
    "model": MODEL,
    "input": [
        message("developer", "You are an agent."),
        message("user", "<cwd>/</cwd>"),
        message("user", "Read both."),
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None,
         "content": [{"type": "reasoning_text", "text": "Two files."}]},
        {**message("assistant", "Looking.", annotations=[], logprobs=[]), "status": "completed"},
        {"type": "function_call", "status": "completed", "id": "fc_1", "name": "read", "namespace": "files",
         "arguments": '{"path": "a"}', "call_id": "call_1"},
        {"type": "function_call", "status": "completed", "id": "fc_2", "name": "read", "namespace": "files",
         "arguments": '{"path": "b"}', "call_id": "call_2"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": FILE},
        {"type": "function_call_output", "id": "fco_2", "call_id": "call_2", "output": [
            {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "high"}]},
    ],
    "tools": [
        {"type": "function", "name": "run", "description": "Run a command", "strict": False, "parameters": PATH},
        {"type": "namespace", "name": "files", "description": "Files of the project.", "tools": [
            {"type": "function", "name": "read", "description": "Read a file", "strict": False, "parameters": PATH}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"x-codex-window-id": "01a2:0"},
}  # fmt: skip

OPENCODE = {
    "model": MODEL,
    "max_tokens": 4096,
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": '"Read both."'},
        {"role": "assistant", "content": "Looking.", "reasoning_content": "Two files.", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "read", "arguments": '{"path":"b"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": FILE},
        {"role": "tool", "tool_call_id": "call_2", "content": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}]},
    ],
    "tools": [{"type": "function", "function": {"name": "read", "description": "Read a file", "parameters": PATH}}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages?beta=true", CLAUDE_CODE), ("/v1/responses", CODEX), ("/v1/chat/completions", OPENCODE)],
    ids=["Claude Code", "Codex", "opencode"],
)
def test_request_of_an_agent_is_answered_and_its_prompt_has_every_text(path: str, body: dict[str, Any]) -> None:
    @in_loop
    async def check() -> None:
        app, engine = make_server(next_token=saying("Done."), **LONG)
        use_template(app, TEMPLATE)
        async with requests_to(app) as client:
            content = json.dumps(body).encode()
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        prompt = text_of(engine.submitted[0].prompt_token_ids)
        assert prompt.index("You are an agent.") < prompt.index("Read both.") < prompt.index("<think>Two files.")
        assert "[tool]" + FILE.replace("\x00", "\ufffd").replace("\ud83d", "\ufffd") in prompt.replace("Error: ", "")
        assert "image" in prompt[prompt.rindex("[tool]") :]
        assert prompt.count("not shown, because this model reads text only") == (2 if body is CLAUDE_CODE else 1)
        assert PICTURE not in prompt

    check()
