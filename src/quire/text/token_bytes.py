"""Bytes of a token, for the two kinds of decoder that language models use.

Byte-level BPE (GPT-2, Llama 3, Qwen) writes each byte as one printable character; SentencePiece (Llama 2, Mistral)
writes a space as "▁" and a byte without a piece as "<0x0A>". In both, a text is the joined bytes of its
tokens read as UTF-8, so that it can be decoded one token at a time. Other decoders (WordPiece, …) differ.
Must not know: prompts, streams, models. Next to read: `detokenizer.py`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SPACE_MARK = "▁"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True, slots=True)
class ByteDecoding:
    """Bytes of the pieces of a vocabulary. `strips_leading_space`: a text loses one leading space.

    Added tokens of a byte-level vocabulary are plain text: "<é>" is three characters, not a byte in angle brackets.
    """

    piece_to_bytes: Callable[[str], bytes]
    added_token_to_bytes: Callable[[str], bytes]
    strips_leading_space: bool


def byte_decoding(backend: Any) -> ByteDecoding | None:
    """Recognise the `decoder` of a backend; return None if it does not work byte by byte."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteDecoding(byte_level_bytes, str.encode, strips_leading_space=False)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    replaces_mark = steps[0]["pattern"] == {"String": _SPACE_MARK} and steps[0]["content"] == " "
    strips_one = all((step["content"], step["start"], step["stop"]) == (" ", 1, 0) for step in steps[3:])
    if not (replaces_mark and strips_one):
        return None
    return ByteDecoding(_sentencepiece_bytes, _sentencepiece_bytes, strips_leading_space=bool(steps[3:]))


def byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character of each byte: itself if Latin-1 shows it, else the next from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = byte_level_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level piece; a piece with characters outside the alphabet is plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    byte = _BYTE_PIECE.match(piece)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return piece.replace(_SPACE_MARK, " ").encode()
