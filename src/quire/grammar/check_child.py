"""Process in which a client's grammar is compiled for the first time: `python -m quire.grammar.check_child DESCRIPTOR`.

A grammar of a few hundred bytes can make a compiler run for hours, exhaust its stack or the memory, and no thread can
stop it. The parent ends this process at the deadline and starts another. The descriptor is a connection: each question
is a JSON object {"kind", "text", "options"}, its answer {"grammar"} or {"error"}. The vocabulary is single bytes: the
expensive part does not depend on the tokens.
Must not know: tokenizers, requests. Next to read: `check_process.py`, the other end.
"""

import contextlib
import json
import re
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import llguidance
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from quire.grammar.limits import READY, parser_limits

MEMORY_BYTES = 1 << 30
STACK_BYTES = 2 << 20
"""Less than any thread of the parent has: a grammar that passes here does not exhaust the stack there."""
ALARM_S = 10
"""Ends this process if the parent was killed."""
_EOS = 256


class ByteTokens:
    """A vocabulary of single bytes, with the attributes that llguidance reads."""

    eos_token_id = _EOS
    bos_token_id = None
    special_token_ids: Sequence[int] = (_EOS,)
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(255)), b"", b"\xff<eos>")

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the token ids of a text."""
        return list(text if isinstance(text, bytes) else text.encode())


def define(kind: str, text: str, options: dict[str, Any]) -> str:
    """Return llguidance's grammar for a structured output. Raises: ValueError."""
    if kind in ("json", "json_object"):
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
        return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
    return LLMatcher.grammar_from_lark(any_to_lark(text))


def check(tokenizer: llguidance.LLTokenizer, kind: str, text: str, options: dict[str, Any]) -> dict[str, str]:
    """Return the answer to one line."""
    try:
        grammar = define(kind, text, options)
    except Exception as error:
        return {"error": str(error)}
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return {"error": matcher.get_error()}
    if matcher.is_stopped() and not matcher.is_accepting():
        return {"error": "no text matches it"}
    schemas = [json.loads(text)] if kind == "json" else schemas_in_lark(grammar) if kind == "grammar" else []
    reason = next(filter(None, map(not_enforced, schemas)), None)
    return {"grammar": grammar} if reason is None else {"error": reason}


def not_enforced(schema: Any) -> str | None:
    """Return the JSON Schema feature that llguidance accepts and does not enforce; None if there is none.

    llguidance refuses the other keywords that it does not implement by itself.
    """
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    for name in ("lenient", "coerce_one_of"):
        if isinstance(options, dict) and options.get(name):
            return f"x-guidance.{name} accepts keywords without enforcing them: leave it out"
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            least = value.get("minProperties")
            if isinstance(least, int | float) and least > 1:
                # A key may come twice and is counted twice.
                return "minProperties above 1 is not supported: name the properties in `required`"
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return None


def schemas_in_lark(grammar: str) -> list[Any]:
    """Return the JSON Schemas after `%json`, llguidance's extension of Lark, in a grammar that llguidance accepted."""
    decoder, found = json.JSONDecoder(), []
    for part in re.finditer(r"%json\s*", grammar):
        with contextlib.suppress(ValueError, RecursionError):  # within a string or a comment
            found.append(decoder.raw_decode(grammar, part.end())[0])
    return found


def serve() -> None:
    """Answer questions until the parent closes the connection."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), eos_token=[_EOS])
    parent = Connection(int(sys.argv[1]))
    parent.send_bytes(READY)
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked = json.loads(parent.recv_bytes())
            signal.alarm(ALARM_S)
            answer = check(tokenizer, asked["kind"], asked["text"], asked["options"])
            signal.alarm(0)
            parent.send_bytes(json.dumps(answer).encode())


def main() -> None:
    """Entry point."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
