"""Limits of one grammar, the same for the check in a separate process and for the matcher of a request.

Next to read: `check_child.py`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance

MAX_LEXER_STATES = 50_000
"""About 0.8 KB each: a request's matcher stays below 40 MB."""
MAX_GRAMMAR_SYMBOLS = 30_000
"""Time grows with their square: about a second at this limit, in each of two processes. 64 KiB of usual properties have
20,000, and 5,000 properties that may be anything 35,000."""
MAX_LEXER_FUEL = 250_000
"""Cost of the lexer's start, in llguidance's units. It also bounds a prefix that the grammar determines, to a third as
many bytes: each takes 0.4 KB in the parser, measured, so that `(ab){1000000}` takes 35 MB instead of 120. 5,000
alternatives of an `enum` need 100,000."""
MAX_ROW_ITEMS = 1024
"""Parses of a text that are followed at once, which 1,000 choices that begin alike need. A step of an ambiguous grammar
takes 70 ms at this limit, measured."""
MAX_FORCED_BYTES = 16 << 10
"""Bytes of a text that a grammar determines at once. A step of the engine takes 1 µs for each, measured."""
NUM_TRIED_BYTES = 8
"""Bytes of a text that a check follows. Most schemas that break a limit do so behind the first brace: a second would be
spent on them in the engine too, and an error tell it there."""
DEADLINE_S = 2.0
"""Processor time to check one grammar."""
READY = b"ready"
"""First message of the process that compiles grammars."""


def parser_limits() -> "llguidance.LLParserLimits":
    """Return the limits for llguidance. Its errors must not quote the grammar and the parser's state."""
    import llguidance

    return llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        initial_lexer_fuel=MAX_LEXER_FUEL,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        max_items_in_row=MAX_ROW_ITEMS,
        verbose_errors=False,
    )
