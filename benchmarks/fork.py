"""Time to the first token of a fork of an answer, by parts, and speed of eight forks beside one, as the page asks.

    python -m benchmarks.fork [--model smollm2] [--tokens 200] [--repetitions 20] [--json]

A server answers once; then forks begin with some of its tokens and another one, as a click on an alternative does.
Rows leave parts out: log probabilities, the prefix (a new system message, so that nothing is cached), the answer
(a prompt alone). Milliseconds from the request to the first token's event, medians and 95th percentiles. Tokens per
second are those of each fork from its first token on.
Next to read: `../src/quire/page/chat.js`.
"""

import http.client
import json
import statistics
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from benchmarks.command_line import Table, make_parser
from benchmarks.server_process import ServerProcess, quire_serve
from quire_workshop.load_client import percentile

QUESTION = [{"role": "user", "content": "Write a long story about a dragon and a small robot."}]
LOGPROBS = {"logprobs": True, "top_logprobs": 8, "return_token_ids": True, "return_tokens_as_token_ids": True}
NUM_FORKS, FORK_TOKENS = 8, 48
MOST_MS, LEAST_SHARE = 60.0, 0.5


def main() -> int:
    """Print the rows. Returns: 6 if a fork's first token takes longer than 60 ms, or eight are slower than half."""
    parser = make_parser(__doc__, "model", "json")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of the answer  [%(default)s]")
    parser.add_argument("--repetitions", type=int, default=20, help="forks of each row  [%(default)s]")
    arguments = parser.parse_args()
    server = ServerProcess(quire_serve(arguments.model, name="served"))
    try:
        client = Client(server.url)
        answer = client.stream({"messages": QUESTION, **LOGPROBS}, arguments.tokens).token_ids
        table = Table({"first token": "", "ms p50": ".1f", "ms p95": ".1f", "cached": "d"}, as_json=arguments.json)
        rows: dict[str, dict[str, Any]] = {
            "fork, as the page asks": LOGPROBS,
            "fork, no logprobs": {},
            "fork, nothing cached": LOGPROBS,
            "prompt alone, cached": LOGPROBS,
        }
        medians = {}
        for name, fields in rows.items():
            times, cached = [], 0
            for number in range(arguments.repetitions):
                messages = list(QUESTION)
                if "nothing" in name:
                    messages.insert(0, {"role": "system", "content": f"You are assistant number {number}."})
                body: dict[str, Any] = {"messages": messages, **fields}
                if "fork" in name:
                    # Another token at another place each time: only what was there before can be cached.
                    body["answer_token_ids"] = [[*answer[: len(answer) - 1 - number], 100 + number]]
                found = client.stream(body, 2)
                times.append(found.first_ms)
                cached = found.num_cached
            medians[name] = statistics.median(times)
            table.row(name, medians[name], percentile(times, 95), cached)
        share = _share_of_eight(client, answer, as_json=arguments.json)
    finally:
        server.kill()
    return 0 if medians["fork, as the page asks"] <= MOST_MS and share >= LEAST_SHARE else 6


def _share_of_eight(client: "Client", answer: list[int], *, as_json: bool) -> float:
    """Print the tokens per second of each of one and of eight forks. Returns: the second by the first."""
    table = Table({"forks together": "d", "tokens/s each": ".1f"}, as_json=as_json)
    speeds = []
    for count in (1, NUM_FORKS):
        forks = [[*answer[: len(answer) // 2], 200 + index] for index in range(count)]
        found = client.stream({"messages": QUESTION, "answer_token_ids": forks, **LOGPROBS}, FORK_TOKENS)
        speeds.append(found.tokens_per_s)
        table.row(count, speeds[-1])
    return speeds[1] / speeds[0]


class Answer:
    """Tokens and times of a stream. `token_ids`: of its first choice; `first_ms`: until the first event of any."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.first_ms = 0.0
        self.num_cached = 0
        self._events: dict[int, list[tuple[float, int]]] = {}

    def note(self, index: int, num_tokens: int) -> None:
        """Take note of an event of a choice. Mutates: its times."""
        self._events.setdefault(index, []).append((time.perf_counter(), num_tokens))

    @property
    def tokens_per_s(self) -> float:
        """Mean over the choices of the tokens behind the first event, by the time since it: prefill does not count."""
        speeds = []
        for (first_s, _), *later in self._events.values():
            speeds.append(sum(count for _, count in later) / (later[-1][0] - first_s))
        return statistics.mean(speeds)


class Client:
    """Connection to a server, kept open as a browser's is."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)

    def stream(self, fields: dict[str, Any], max_tokens: int) -> Answer:
        """Ask for chat answers of `max_tokens` tokens each; the tokens are those of the first."""
        body = {"model": "served", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0,
                "ignore_eos": True, "max_tokens": max_tokens, **fields}  # fmt: skip
        data, answer, first_s = json.dumps(body), Answer(), 0.0
        began_s = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        for row in (response := self._connection.getresponse()):
            if response.status != 200:
                sys.exit(f"the server answered {response.status}: {row.decode()}")
            if not row.startswith(b"data: {"):
                continue
            chunk = json.loads(row[6:])
            for choice in chunk.get("choices", ()):
                token_ids = choice.get("token_ids") or []
                if choice["delta"].get("content") or token_ids:
                    first_s = first_s or time.perf_counter()
                if token_ids:
                    answer.note(choice["index"], len(token_ids))
                if choice["index"] == 0:
                    answer.token_ids += token_ids
            if usage := chunk.get("usage"):
                answer.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        answer.first_ms = 1e3 * (first_s - began_s)
        return answer


if __name__ == "__main__":
    raise SystemExit(main())
