"""A vocabulary of bytes and some longer tokens, and what grammars make of it."""

from collections.abc import Sequence

from quire.grammar.matcher import TokenMatcher, Vocabulary

LONGER = ["ab", "abc", "true", "false", '":', '", "', "  ", "é", "12"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in LONGER), b"<eos>", b"<tool>", b"", b""]
EOS = TOKENS.index(b"<eos>")
SPECIAL = TOKENS.index(b"<tool>")
VOCAB_SIZE = len(TOKENS)


def encode(text: str) -> list[int]:
    return list(text.encode())


def make_vocabulary(eos: Sequence[int] = (EOS,)) -> Vocabulary:
    return Vocabulary(TOKENS, frozenset({EOS, SPECIAL}), tuple(eos), encode)


def allowed_bytes(matcher: TokenMatcher) -> set[bytes]:
    return {TOKENS[token_id] for token_id in matcher.allowed().tolist()}


def feed(matcher: TokenMatcher, text: str) -> None:
    """Byte by byte; each must be allowed."""
    for byte in text.encode():
        assert byte in matcher.allowed(), (text, chr(byte), matcher.failure)
        matcher.append(byte)


def accepts(matcher: TokenMatcher, text: str) -> bool:
    """Return True if the whole text is complete: it can be followed to its end, and the end token may come there."""
    for byte in text.encode():
        if byte not in matcher.allowed():
            return False
        matcher.append(byte)
    return EOS in matcher.allowed()
