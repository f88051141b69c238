from quire.grammar.limits import MAX_GRAMMAR_SYMBOLS, MAX_LEXER_STATES, MAX_ROW_ITEMS, parser_limits


def test_the_library_gets_the_limits() -> None:
    limits = parser_limits()
    assert limits.max_lexer_states == MAX_LEXER_STATES
    assert limits.max_grammar_size == MAX_GRAMMAR_SYMBOLS
    assert limits.max_items_in_row == MAX_ROW_ITEMS
    assert not limits.verbose_errors
