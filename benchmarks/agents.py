"""Share of an agent's prompts that comes from the prefix cache, and its times to the first token, turn by turn.

    python -m benchmarks.agents [--model smollm2] [--turns 50] [--rules 150] [--tools 16] [--generate 12]

A client replays one session through `quire serve`: a long system text and tools, then in turn a question, an answer
with a call of a tool, and the tool's result. Each turn sends the whole history with the answers that the model gave.
Rows: one server; the same session whose server is ended and started again before the middle turn, with a disk tier; a
few turns with a number in the first words of the system text that changes every turn, which breaks the prefix there.
Shares are of turns 2 and later. Exits with 6 if the first two rows have less than 98 %, or the first row's median time
is above 150 ms. The defaults fit SmolLM2's context of 8,192 tokens.
"""

import asyncio
import itertools
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.command_line import Table, cpu_name, make_parser
from benchmarks.server_process import ServerProcess, quire_serve
from quire.cli.server_client import StreamedAnswer
from quire_workshop.load_client import LoadTarget, StreamClient, percentile

CHAT = "/v1/chat/completions"
SHARE, FIRST_TOKEN_MS = 0.98, 150.0
NUM_BROKEN = 4
"""Turns of the session with the changing header: each computes its whole prompt."""
STOP_S = 20.0
SUBJECTS = ("files", "tests", "branches", "servers", "tables", "reports", "letters", "pictures", "orders", "meetings")
VERBS = ("read", "write", "search", "list", "move", "compare", "delete", "count")
CITIES = ("Ulm", "Bonn", "Kiel", "Trier", "Jena")


def system_text(num_rules: int, header: str) -> str:
    """Return rules for an assistant behind a header."""
    pairs = itertools.islice(itertools.cycle(itertools.product(VERBS, SUBJECTS)), num_rules)
    rules = [f"Rule {number}: before you {verb} {subject}, say in one sentence why it is needed and what may go wrong."
             for number, (verb, subject) in enumerate(pairs, 1)]  # fmt: skip
    return "\n".join((f"Session {header}. You are an assistant who works with tools.", *rules))


def tool(number: int) -> dict[str, Any]:
    """Return a tool with three parameters."""
    verb, subject = VERBS[number % len(VERBS)], SUBJECTS[number % len(SUBJECTS)]
    texts = {
        "path": f"Where the {subject} are, as a path relative to the working directory",
        "pattern": f"Only {subject} whose name has this pattern; all of them if it is left out",
        "limit": "The most results to return, 100 if it is left out",
    }
    properties = {name: {"type": "integer" if name == "limit" else "string", "description": text}
                  for name, text in texts.items()}  # fmt: skip
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    description = f"Tool to {verb} {subject}. Returns one line per result, the newest first."
    function = {"name": f"{verb}_{subject}_{number}", "description": description, "parameters": schema}
    return {"type": "function", "function": function}


@dataclass
class Session:
    """A conversation that grows by a turn at a time. `changes_header`: the system text begins with the turn."""

    num_rules: int
    tools: list[dict[str, Any]]
    changes_header: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_turns: int = 0

    def next_turn(self) -> dict[str, Any]:
        """Add the user's question, or the result of the call in the last answer. Returns: fields of the body."""
        turn, self.num_turns = self.num_turns, self.num_turns + 1
        if turn % 2:
            result = f"{7 * turn % 30} rows"
            self.messages.append({"role": "tool", "tool_call_id": f"call{turn - 1}", "content": result})
        else:
            self.messages.append({"role": "user", "content": f"And {CITIES[turn // 2 % len(CITIES)]}?"})
        system = system_text(self.num_rules, str(turn if self.changes_header else 0))
        return {"messages": [{"role": "system", "content": system}, *self.messages], "tools": self.tools}

    def take(self, answer: StreamedAnswer) -> None:
        """Add the model's answer, with a call if it answers a question."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        turn = self.num_turns - 1
        if not turn % 2:
            function = {"name": self.tools[0]["function"]["name"], "arguments": '{"path": "a"}'}
            message["tool_calls"] = [{"id": f"call{turn}", "type": "function", "function": function}]
        self.messages.append(message)


@contextmanager
def serving(model: str, directory: str | None) -> Iterator[StreamClient]:
    """Run a server, with a disk tier in `directory` if it is given, and end it in an orderly way."""
    options = () if directory is None else ("--kv-disk", directory)
    server = ServerProcess(quire_serve(model, *options, name="model"))
    try:
        client = StreamClient(LoadTarget(server.url, CHAT))
        warm_up = {"model": "model", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        asyncio.run(client.ask({**warm_up, "stream": True}))
        yield StreamClient(LoadTarget(server.url, CHAT))
        server.signal(signal.SIGTERM)
        server.process.wait(STOP_S)
    finally:
        server.kill()


def ask(client: StreamClient, session: Session, num_turns: int, generate: int) -> list[StreamedAnswer]:
    """Return the answers of the session's next turns. Raises: RuntimeError if one fails."""

    async def ask_all() -> list[StreamedAnswer]:
        answers = []
        for _ in range(num_turns):
            body = {"model": "model", "temperature": 0, "max_tokens": generate, "stream": True,
                    "stream_options": {"include_usage": True}, "ignore_eos": True}  # fmt: skip
            answer = await client.ask({**body, **session.next_turn()})
            if answer.error is not None or not answer.chunk_times:
                raise RuntimeError(f"turn {session.num_turns} failed: {answer.error or 'no text'}")
            session.take(answer)
            answers.append(answer)
        return answers

    return asyncio.run(ask_all())


def main() -> int:
    """Print a row per case."""
    parser = make_parser(__doc__, "model", "json")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--rules", type=int, default=150, help="sentences of the system text  [%(default)s]")
    parser.add_argument("--tools", type=int, default=16)
    parser.add_argument("--generate", type=int, default=12, help="tokens per answer  [%(default)s]")
    arguments = parser.parse_args()
    tools = [tool(number) for number in range(arguments.tools)]
    formats = {cpu_name(): "", "prompt, turn 1": "d", "last turn": "d", "first token ms, turn 1": ".0f",
               "cached from turn 2": ".1%", "p50 ms": ".0f", "p95 ms": ".0f", "after restart ms": ".0f"}  # fmt: skip
    table = Table(formats, as_json=arguments.json)
    shares, medians = [], []
    for name, restarts, changes_header in (("one server", False, False), ("restarted, disk tier", True, False),
                                           ("header changes", False, True)):  # fmt: skip
        session = Session(arguments.rules, tools, changes_header)
        num_turns = min(NUM_BROKEN, arguments.turns) if changes_header else arguments.turns
        num_first = num_turns // 2 if restarts else num_turns
        with tempfile.TemporaryDirectory() as directory:
            place = directory if restarts else None
            with serving(arguments.model, place) as client:
                answers = ask(client, session, num_first, arguments.generate)
            if restarts:
                with serving(arguments.model, place) as client:
                    answers += ask(client, session, num_turns - num_first, arguments.generate)
        first, *later = answers
        times = [1e3 * answer.time_to_first_s for answer in later]
        num_prompt_tokens = sum(answer.num_prompt_tokens for answer in later)
        shares.append(sum(answer.num_cached_tokens for answer in later) / num_prompt_tokens)
        medians.append(statistics.median(times))
        table.row(name, first.num_prompt_tokens, later[-1].num_prompt_tokens, 1e3 * first.time_to_first_s, shares[-1],
                  medians[-1], percentile(times, 95), times[num_first - 1] if restarts else None)  # fmt: skip
    return 0 if min(shares[:2]) >= SHARE and medians[0] <= FIRST_TOKEN_MS else 6


if __name__ == "__main__":
    sys.exit(main())
