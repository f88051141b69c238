"""Text to token ids and back, for one model.

Wraps the tokenizers library and adds special tokens and decoding as bytes; it carries the model's chat templates.
Made by `load_tokenizer_directory` or `load_tokenizer_gguf`. Must not know: requests, the scheduler, tensors; importing
this file loads neither torch nor numpy nor jinja2. Next to read: `detokenizer.py`; and `dialogue.py`, which
renders chats.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ModelFileError, PromptError
from quire.text.chat_template import RenderedChat, SpecialTokenMarks
from quire.text.directory_tokenizer import build_directory_tokenizer
from quire.text.gguf_tokenizer import build_gguf_tokenizer
from quire.text.tokenizer_parts import TokenizerParts, find_end_tokens, library_errors

LONG_TEXT = 4096
"""Characters; such a text takes about 2 ms."""
_CANNOT_ENCODE = "the model's tokenizer cannot encode this text"
MAX_VOCAB_SIZE = 1 << 22
"""Lists of all tokens are made. The largest vocabularies have 262,144."""
MAX_MARK_LENGTHS = 100
"""Different lengths of special tokens: each is tried at each place of a message where one may begin."""
IDENTITY_STRIDE = 16
"""All 250,000 pieces of a large vocabulary would take 0.1 s to read."""


class Tokenizer:
    """Encodes and decodes. Thread-safe.

    Attributes:
        vocab_size: ids are below this. The model's vocabulary may be larger (padding): such ids decode to "".
        bos_token_id, eos_token_id: None where the model has none.
        end_token_ids: every token that ends a turn or a text, EOS included.
        special_token_ids: tokens that mark structure, removed by `skip_special_tokens`.
        special_tokens: their texts.
        chat_templates: Jinja2 sources by name; "default" is used unless a request names another.
        template_variables: names that chat templates may use, such as `bos_token`, with their text.
        marks: finds special tokens in the text of messages.
        fim: tokens of the fill-in-the-middle format; None if the model has none.
        byte_decoding: bytes of tokens; None for a tokenizer that does not work byte by byte.
    """

    def __init__(self, parts: TokenizerParts, *, model_vocab_size: int | None = None) -> None:
        """`model_vocab_size`: `encode` then refuses text with tokens the model has no embedding for.

        Raises: ModelFileError for more than `MAX_VOCAB_SIZE` tokens or `MAX_MARK_LENGTHS` lengths.
        """
        self._backend = parts.backend
        self.template_variables = parts.template_variables
        self.chat_templates = parts.chat_templates
        added: dict[int, Any] = parts.backend.get_added_tokens_decoder()
        self._added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.vocab_size: int = max(parts.backend.get_vocab_size(), max(self._added_tokens, default=-1) + 1)
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ModelFileError(
                f"the tokenizer has ids up to {self.vocab_size - 1}, more than {MAX_VOCAB_SIZE} tokens"
            )
        self.bos_token_id = parts.bos_token_id
        self.eos_token_id = parts.eos_token_id
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        ids = {text: token_id for token_id, text in self._added_tokens.items()}
        named = parts.end_token_ids.union(() if parts.eos_token_id is None else (parts.eos_token_id,))
        self.end_token_ids: frozenset[int] = named | find_end_tokens(ids, self.special_token_ids)
        self.byte_decoding = byte_decoding(parts.backend)
        self.fim = parts.fim
        marked = self.special_token_ids.union(() if parts.fim is None else parts.fim.endings)
        self.special_tokens = frozenset(self._added_tokens[token_id] for token_id in self.special_token_ids)
        pieces = [piece for token_id in marked if (piece := self.id_to_token(token_id))]
        if len(set(map(len, pieces))) > MAX_MARK_LENGTHS:
            raise ModelFileError(f"the special tokens have more than {MAX_MARK_LENGTHS} different lengths")
        self.marks = SpecialTokenMarks(pieces)
        self._bytes_of: dict[int, bytes] = {}
        # None if every id of the tokenizer has an embedding, which is the usual case.
        exceeds_model = model_vocab_size is not None and self.vocab_size > model_vocab_size
        self._id_limit = model_vocab_size if exceeds_model else None

    @property
    def chat_template(self) -> str | None:
        """Return the Jinja2 source of the default template; None without one."""
        return self.chat_templates.get("default")

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Longest piece of the vocabulary, in characters: n characters are at least n / max_token_chars tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @functools.cached_property
    def identity(self) -> str:
        """Return a digest of the vocabulary, of one piece in `IDENTITY_STRIDE` and all added tokens."""
        ids = sorted({*range(0, self.vocab_size, IDENTITY_STRIDE), *self._added_tokens})
        pieces = "\0".join(f"{token_id} {self.id_to_token(token_id)}" for token_id in ids)
        return hashlib.sha256(f"{self.vocab_size}\0{pieces}".encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written in the text are recognised.

        `add_special_tokens` adds BOS and EOS if the model needs them; a rendered chat already has them.
        Raises: PromptError for a value that is not Unicode text; ModelFileError if the tokenizers library fails.
        """
        if not isinstance(text, str):
            raise PromptError(f"a prompt must be a string, got {type(text).__name__}")
        try:
            with library_errors(_CANNOT_ENCODE):
                # The library releases the GIL only while it encodes a batch; a text of 1 MiB takes a second.
                found = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = found[0].ids
        except (TypeError, UnicodeEncodeError):
            position = next(index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff")
            raise PromptError(
                f"the prompt has half of a surrogate pair (U+{ord(text[position]):04X}) at character {position}, which "
                f"is not Unicode text; remove it"
            ) from None
        return self._checked(ids)

    @library_errors(_CANNOT_ENCODE)
    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts with the special tokens that the model has for pairs.

        Raises: PromptError for a text with tokens that the model has no embedding for.
        """
        return self._checked(self._backend.encode(first, second).ids)

    def _checked(self, ids: list[int]) -> list[int]:
        if self._id_limit is not None and max(ids, default=0) >= self._id_limit:
            piece = self._backend.id_to_token(max(ids))
            raise PromptError(
                f"the prompt contains {piece!r} (token {max(ids)}), but the model's vocabulary ends at "
                f"{self._id_limit - 1}; remove it from the prompt"
            )
        return ids

    @library_errors("the model's tokenizer cannot decode these tokens")
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are dropped.

        Raises: ModelFileError if the tokenizers library fails.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        decoding = self.byte_decoding
        if decoding is None:
            known = [int(token_id) for token_id in ids if 0 <= token_id < self.vocab_size and token_id not in skipped]
            text: str = self._backend.decode(known, skip_special_tokens=False)
            return text
        raw = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in skipped])
        text = raw.decode("utf-8", "replace")
        return text.removeprefix(" ") if decoding.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; b"" outside the vocabulary. Needs `byte_decoding`.

        A character may have several tokens, so that the bytes of one token need not be valid UTF-8.
        """
        known = self._bytes_of.get(token_id)
        if known is not None:
            return known
        decoding = self.byte_decoding
        assert decoding is not None, "token_bytes is defined by byte_decoding"
        piece = self.id_to_token(token_id)
        if piece is None:
            return b""
        is_added = token_id in self._added_tokens
        raw = decoding.added_token_to_bytes(piece) if is_added else decoding.piece_to_bytes(piece)
        self._bytes_of[token_id] = raw
        return raw

    def is_text(self, token_id: int) -> bool:
        """Return whether a token is a piece of ordinary text: in the vocabulary, but not matched whole."""
        return 0 <= token_id < self.vocab_size and token_id not in self._added_tokens

    def token_text(self, token_id: int) -> str:
        """Return the text of one token with its leading space; U+FFFD for part of a character."""
        if self.byte_decoding is None:
            return self.decode([token_id], skip_special_tokens=False)
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """Return the piece as it is in the vocabulary ("Ġthe", "<0x0A>"); None outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            return None
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def encode_chat(self, chat: RenderedChat, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a prompt. Only the template makes special tokens, BOS included.

        A tokenizer that adds a space to the beginning of a text adds one to each piece. Raises: PromptError.
        """
        whole = self.encode(chat.pieces[0], add_special_tokens=add_special_tokens)
        if len(chat.pieces) == 1:
            return whole
        first, *others = [self.encode(piece, add_special_tokens=False) for piece in chat.pieces]
        # BOS and EOS of the first piece go around all pieces.
        starts = range(len(whole) - len(first) + 1)
        end = next((at + len(first) for at in starts if whole[at : at + len(first)] == first), None)
        if end is None:
            raise ModelFileError(f"{_CANNOT_ENCODE}: it leaves out text; fetch the model again")
        return [*whole[:end], *(token_id for ids in others for token_id in ids), *whole[end:]]


@library_errors("the directory has no valid tokenizer")
def load_tokenizer_directory(path: str | Path, *, model_vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory. Raises: ModelFileError, UnsupportedModelError."""
    return Tokenizer(build_directory_tokenizer(Path(path)), model_vocab_size=model_vocab_size)


@library_errors("the file has no valid tokenizer")
def load_tokenizer_gguf(metadata: Mapping[str, Any], *, model_vocab_size: int | None = None) -> Tokenizer:
    """Build the tokenizer that the metadata of a GGUF file describes. Raises: ModelFileError, UnsupportedModelError."""
    return Tokenizer(build_gguf_tokenizer(metadata), model_vocab_size=model_vocab_size)


# --- Bytes of a token, for the two kinds of decoder that language models use ----------------------
# Byte-level BPE (GPT-2, Llama 3, Qwen) writes each byte as one printable character; SentencePiece (Llama 2, Mistral)
# writes a space as "▁" and a byte without a piece as "<0x0A>". In both, a text is the joined bytes of its
# tokens read as UTF-8, so that it can be decoded one token at a time. Other decoders (WordPiece, …) differ.

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
