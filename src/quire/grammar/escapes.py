"""`EscapeRule`: of the ways to write a character in JSON only one is left, so that one name has one spelling.

The library keeps names apart by their bytes: beside a declared "a" it takes another key written with `\\u0061`, which
a parser of JSON reads as "a" again, whatever stands behind it.
Next to read: `matcher.py`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_SHORT = {0x08, 0x09, 0x0A, 0x0C, 0x0D}
"""These are written with one letter after the backslash."""
_ALLOWED = frozenset(b"\\u%04x" % code for code in range(0x20) if code not in _SHORT)
"""As the library writes what cannot stand in JSON as it is."""
_BEGUN = frozenset(escape[:length] for escape in _ALLOWED for length in range(1, 6))


class EscapeRule:
    """Which tokens keep to the one spelling, by what of an escape stands before them. For any number of texts."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._kept: dict[bytes, npt.NDArray[np.bool_]] = {}

    def after(self, begun: bytes, token_id: int) -> bytes:
        """What of an escape a text ends with: `begun` before the token. Nothing after an escape that is not allowed."""
        return _after(begun, self._tokens[token_id]) or b""

    def allowed(self, begun: bytes) -> npt.NDArray[np.bool_]:
        """Tokens that keep to the rule. Shapes: [V]."""
        found = self._kept.get(begun)
        if found is None:
            found = np.array([_after(begun, token) is not None for token in self._tokens], np.bool_)
            self._kept[begun] = found  # eight at most: nothing, and the beginnings of an escape
        return found


def _after(begun: bytes, token: bytes) -> bytes | None:
    """The escape that is begun after these bytes; None if one is not allowed."""
    if not begun and b"\\" not in token:
        return b""
    for byte in token:
        if not begun:
            begun = b"\\" if byte == ord("\\") else b""
            continue
        begun += bytes((byte,))
        if begun in _ALLOWED or (len(begun) == 2 and byte != ord("u")):
            begun = b""
        elif begun not in _BEGUN:
            return None
    return begun
