"""What one grammar may cost: the same limits for the check in a process of its own and for the matcher of a request.

Next to read: `check_child.py`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance

MAX_LEXER_STATES = 50_000
"""About 0.8 KB each: a request's matcher stays below 40 MB."""
MAX_GRAMMAR_SYMBOLS = 200_000
MAX_ROW_ITEMS = 1000
"""Readings of a text that are followed at once. A step of an ambiguous grammar takes 70 ms at this limit, measured."""
DEADLINE_S = 2.0
"""For the check of one grammar."""


def parser_limits() -> "llguidance.LLParserLimits":
    """The limits as the library takes them. Its errors must not quote the grammar and the parser's state."""
    import llguidance

    return llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        max_items_in_row=MAX_ROW_ITEMS,
        verbose_errors=False,
    )
