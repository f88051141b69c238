"""What one grammar may cost: the same limits for the check in a process of its own and for the matcher of a request.

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
"""For the lexer's start, in the library's units. It bounds the bytes that a text must begin with as well, a third as
many: each is kept with what the parser makes of it, 0.4 KB measured, so that `(ab){1000000}` takes 35 MB and not 120.
5,000 alternatives of an `enum` need 100,000."""
MAX_ROW_ITEMS = 1000
"""Readings of a text that are followed at once. A step of an ambiguous grammar takes 70 ms at this limit, measured."""
DEADLINE_S = 2.0
"""For the check of one grammar."""


def parser_limits() -> "llguidance.LLParserLimits":
    """The limits as the library takes them. Its errors must not quote the grammar and the parser's state."""
    import llguidance

    return llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        initial_lexer_fuel=MAX_LEXER_FUEL,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        max_items_in_row=MAX_ROW_ITEMS,
        verbose_errors=False,
    )
