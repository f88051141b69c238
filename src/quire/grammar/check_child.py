"""Process in which a client's grammar is compiled for the first time: `python -m quire.grammar.check_child DESCRIPTOR`.

A grammar of a few hundred bytes can make a compiler run for hours, exhaust its stack or the memory, and no thread can
stop it. The parent ends this process at the deadline and starts another. The descriptor is a connection: each question
is a JSON object {"kind", "text", "options"}, its answer {"grammar"} or {"error"}. The vocabulary is single bytes: the
expensive part does not depend on the tokens.
Must not know: tokenizers, requests. Next to read: `check_process.py`, the other end.
"""

import contextlib
import json
import os
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

from quire.grammar.limits import MAX_FORCED_BYTES, NUM_TRIED_BYTES, READY, parser_limits
from quire.grammar.patterns import LARK_PARTS, ascii_classes
from quire.grammar.schemas import UnenforceableError, enforceable

MEMORY_BYTES = 1 << 30
STACK_BYTES = 2 << 20
"""Less than any thread of the parent has: a grammar that passes here does not exhaust the stack there."""
ALARM_S = 10
"""Ends this process if the parent was killed."""
NICENESS = 10
"""Steps of the engine come first: a check of two seconds doubled the inter-token latency of other clients (2 CPUs)."""
_EOS = 256
_BYTES = (1 << 255) - 1
"""Mask of the tokens that are bytes."""


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
        schema = _enforceable(json.loads(text))
        return LLMatcher.grammar_from_json_schema(_json_text(schema), overrides=options)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(ascii_classes(text))
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_json_text, json.loads(text))))
    return LLMatcher.grammar_from_lark(_enforceable_lark(any_to_lark(text), options))


def check(tokenizer: llguidance.LLTokenizer, kind: str, text: str, options: dict[str, Any]) -> dict[str, str]:
    """Return the answer to one line."""
    try:
        grammar = define(kind, text, options)
    except Exception as error:
        return {"error": str(error)}
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    for step in range(NUM_TRIED_BYTES):
        allowed = 0 if matcher.is_error() else int.from_bytes(matcher.compute_bitmask(), "little") & _BYTES
        if matcher.is_error():
            return {"error": matcher.get_error()}
        if not step and matcher.is_stopped() and not matcher.is_accepting():
            return {"error": "no text matches it"}
        if len(matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
            return {"error": f"it determines more than {MAX_FORCED_BYTES} bytes of the text at once"}
        if not allowed:
            break
        matcher.consume_token(allowed.bit_length() - 1)
    return {"grammar": grammar}


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _enforceable(schema: Any) -> Any:
    """Return a schema that llguidance enforces. Raises: ValueError."""
    try:
        return enforceable(schema)
    except (AttributeError, TypeError) as error:
        # A keyword has a value of the wrong type: llguidance says which.
        reason = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(_json_text(schema)))
        raise UnenforceableError(reason or f"a keyword of the schema has a value of the wrong type: {error}") from None


def _enforceable_lark(grammar: str, options: dict[str, Any]) -> str:
    """Return a Lark grammar with ASCII's classes, and with schemas that llguidance enforces. Raises: ValueError.

    Between the parts of a schema's JSON there is the whitespace of `options`, unless the schema has options of its own.
    """
    parts, end = [], 0
    for found in LARK_PARTS.finditer(grammar):
        after = found.end()
        if found["regex"]:
            text = ascii_classes(found[0])
        elif found["json"] and found.start() >= end:
            try:
                schema, after = json.JSONDecoder().raw_decode(grammar, after)
                schema = _enforceable(schema)
                if isinstance(schema, dict):
                    schema = {"x-guidance": options, **schema}
                text = f"{found[0]}{_json_text(schema)}"
            except UnenforceableError:
                raise
            except (ValueError, RecursionError):  # llguidance has a message for it
                continue
        else:
            continue
        parts += [grammar[end : found.start()], text]
        end = after
    return "".join([*parts, grammar[end:]])


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
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
