"""The JSON Schemas inside of a grammar: what stands behind `%json` in Lark as llguidance extends it.

For grammars that the library has taken: the parts of the notation are told apart here, not judged.
Next to read: `schema_rules.py`.
"""

import json
import re
from collections.abc import Iterator

from quire.grammar.schema_rules import unenforceable

_PART = re.compile(
    r"""(?P<value>%json|%regex|%llguidance)\s*"""
    r"""|"(?:\\.|[^"\\])*" | /(?:\\.|[^/\\])+/ | <[^<>\s]+> | (?:\#|//)[^\n]*""",
    re.VERBOSE | re.DOTALL,
)
"""What may hold the word `%json`, and the word itself: a text, a regex, a special token, a comment, a JSON value."""


def unenforceable_inside(grammar: str) -> str | None:
    """Why one of the schemas in a grammar cannot be enforced, and where it stands; None if all can.

    In such a text a name may be written in several ways, since what else it holds is not JSON.
    """
    try:
        for line, text in _schemas(grammar):
            reason = unenforceable(text, has_one_spelling=False)
            if reason is not None:
                return f"the %json in line {line}: {reason}"
    except ValueError:  # a number, say, that only the library can read
        return "a %json in it holds JSON that cannot be read here: write its numbers shorter"
    return None


def _schemas(grammar: str) -> Iterator[tuple[int, str]]:
    """Line and text of each. Raises: ValueError where a value is no JSON."""
    decoder = json.JSONDecoder()
    position = 0
    while (part := _PART.search(grammar, position)) is not None:
        position = part.end()
        if part["value"] is not None:
            start = position
            _, position = decoder.raw_decode(grammar, start)
            if part["value"] == "%json":
                yield grammar.count("\n", 0, part.start()) + 1, grammar[start:position]
