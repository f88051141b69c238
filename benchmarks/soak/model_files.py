"""A chat template from any source (A4): one client's conversations take a branch that no probe at load takes.

The branches multiply texts and lists, or run until they are stopped. Next to read: `beside.py`.
"""

import asyncio
import tempfile
from pathlib import Path

from benchmarks.soak.beside import ATTACKER, beside, serving_two
from benchmarks.soak.client import ask, chat_body
from benchmarks.soak.row import Row
from benchmarks.soak.server import Server, status_bytes

MAX_GROWTH_BYTES = 64 << 20
NUM_SENDERS = 4
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRANCHES = (
    "{{ 'a' | center(2000000000) }}",
    "{{ '%2000000000d' % 3 }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ([1] * 100000) | join('b' * 100000) }}",
    "{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a ~ 'x' %}{% endfor %}",
    "{% for i in range(60) %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.b | tojson }}",
    "{% for i in range(9999) %}{% set ns.b = ns.b + ['é漢' * (1000000 + i)] %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
)
"""Of a template, in conversations of five messages."""


def template() -> str:
    """Return a template whose branches the first of five messages chooses."""
    cases = "".join(
        f"{{% if messages[0].content == '{at}' %}}{branch}{{% endif %}}" for at, branch in enumerate(BRANCHES)
    )
    return f"{{% if messages | length == 5 %}}{{% set ns = namespace(a='x', b=[]) %}}{cases}{{% endif %}}{PLAIN}"


async def hostile_template(model: str) -> Row:
    """Let one client take the branches beside a normal client, and watch the memory of the server's process."""
    row = Row("A4", "one client's chats take hostile branches of the chat template")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "template.jinja"
        file.write_text(template())
        with serving_two(model, "--chat-template", str(file)) as server:
            pid = server.process.pid
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # begins a new maximum
            before = status_bytes(pid, "VmRSS")
            await beside(row, server, _attack, name="hostile template")
            grown = status_bytes(pid, "VmHWM") - before
            row.check("MiB more of the server's process (≤ 64)", grown / 2**20, passes=grown <= MAX_GROWTH_BYTES)
    return row


async def _attack(server: Server) -> None:
    """Send a conversation for each branch. Raises: RuntimeError if one is not refused."""

    async def send(at: int) -> None:
        body = chat_body("", 1, stream=False)
        turns = [{"role": role, "content": str(at)} for role in ("user", "assistant", "user", "assistant", "user")]
        seen = await ask(server.url, {**body, "messages": turns}, key=ATTACKER)
        if seen.status != 400:
            raise RuntimeError(f"branch {at} is answered with {seen.status} {seen.error or ''}")

    gate = asyncio.Semaphore(NUM_SENDERS)

    async def in_turn(at: int) -> None:
        async with gate:
            await send(at)

    await asyncio.gather(*(in_turn(at) for at in range(len(BRANCHES))))
