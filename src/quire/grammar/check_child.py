"""The process in which a client's grammar is compiled for the first time: `python -m quire.grammar.check_child`.

A grammar of a few hundred bytes can make a compiler run for hours, exhaust its stack or the memory, and neither can be
stopped from within. Here it may: the parent ends this process at the deadline and starts another.
One JSON object per line on standard input, {"kind", "text", "options"}; one on standard output, {"grammar"} or
{"error"}. It compiles for a vocabulary of single bytes: what is expensive does not depend on the tokens.
Must not know: tokenizers, requests. Next to read: `check_process.py`, the other end.
"""

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import llguidance
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from quire.grammar.lark_schemas import unenforceable_inside
from quire.grammar.limits import parser_limits
from quire.grammar.schema_rules import unenforceable

MEMORY_BYTES = 1 << 30
STACK_BYTES = 2 << 20
"""Less than any thread of the parent has: what passes here does not exhaust the stack there."""
ALARM_S = 10
"""Ends this process if the parent was killed and nobody else can."""
_EOS = 256


class ByteTokens:
    """A vocabulary of single bytes, as the library asks for it."""

    eos_token_id = _EOS
    bos_token_id = None
    special_token_ids: Sequence[int] = (_EOS,)
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(255)), b"", b"\xff<eos>")

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text."""
        return list(text if isinstance(text, bytes) else text.encode())


def define(kind: str, text: str, options: dict[str, Any]) -> str:
    """The library's grammar for a form. Raises: ValueError."""
    if kind in ("json", "json_object"):
        return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
        return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
    return LLMatcher.grammar_from_lark(any_to_lark(text))


def check(tokenizer: llguidance.LLTokenizer, kind: str, text: str, options: dict[str, Any]) -> dict[str, str]:
    """The answer to one line."""
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
    reason = None
    if kind == "json":
        reason = unenforceable(text)
    elif kind == "grammar":
        reason = unenforceable_inside(grammar)
    return {"grammar": grammar} if reason is None else {"error": reason}


def serve() -> None:
    """Answer lines until there are no more."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()), eos_token=[_EOS])
    answers = os.fdopen(1, "wb", buffering=0)
    answers.write(b"{}\n")  # ready
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        signal.alarm(ALARM_S)
        answer = check(tokenizer, asked["kind"], asked["text"], asked["options"])
        signal.alarm(0)
        answers.write(json.dumps(answer).encode() + b"\n")


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
