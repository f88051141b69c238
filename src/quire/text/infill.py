"""Prompts that fill in the middle: a prefix and a suffix between the markers that the model was trained with.

The markers are given as token ids, and the texts are encoded so that no token that is written in them becomes a
marker. Must not know: requests, the server. Next to read: `tokenizer_parts.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_parts import FimTokens

REPOSITORY_NAME, CURRENT_NAME = "repository", "current"
"""Names for the repository and the file to fill in, which requests do not name."""


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """A prompt. `num_truncated`: tokens of prefix, suffix and files that had no room."""

    token_ids: list[int]
    num_truncated: int


def infill_prompt(
    tokenizer: Tokenizer,
    fim: FimTokens,
    prefix: str,
    suffix: str,
    *,
    files: Sequence[tuple[str, str]] = (),
    adds_bos: bool = True,
    max_len: int | None = None,
) -> InfillPrompt:
    """Return the prompt for the text between `prefix` and `suffix`.

    `files`: names and texts of other files, which come first; the last is the most important. With more than `max_len`
    tokens, files are left out, then the beginning of the prefix and the end of the suffix are. The markers always
    remain. Raises: PromptError.
    """
    whole_prefix, whole_suffix = _encoded(tokenizer, prefix), _continued(tokenizer, suffix)
    head = _bos(tokenizer) if adds_bos else []
    middle = [] if fim.middle is None else [fim.middle]
    context = [_file(tokenizer, fim, *file) for file in files]
    room = None if max_len is None else max(0, max_len - len(head) - len(middle) - 2)
    prefix_ids, suffix_ids = _around_gap(whole_prefix, whole_suffix, room)
    num_truncated = len(whole_prefix) + len(whole_suffix) - len(prefix_ids) - len(suffix_ids)
    if room is not None:
        room -= len(prefix_ids) + len(suffix_ids)
    before, num_left_out = _before(tokenizer, fim, context, room)
    texts = [[fim.prefix, *prefix_ids], [fim.suffix, *suffix_ids]]
    first, second = reversed(texts) if fim.suffix_first else texts
    return InfillPrompt([*head, *before, *first, *second, *middle], num_truncated + num_left_out)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_chat(tokenizer.marks.render(lambda marked: marked(text)))


def _continued(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text inside a line: without the space that SentencePiece puts before a text."""
    if tokenizer.byte_decoding is None or not tokenizer.byte_decoding.strips_leading_space:
        return _encoded(tokenizer, text)
    line, both = _encoded(tokenizer, "\n"), _encoded(tokenizer, "\n" + text)
    return both[len(line) :] if both[: len(line)] == line else _encoded(tokenizer, text)


def _bos(tokenizer: Tokenizer) -> list[int]:
    """Return the BOS token if the tokenizer adds one to texts; an EOS that it adds would end the prompt."""
    return [token_id for token_id in tokenizer.encode("") if token_id == tokenizer.bos_token_id][:1]


def _around_gap(prefix: list[int], suffix: list[int], room: int | None) -> tuple[list[int], list[int]]:
    """Return the end of the prefix and the start of the suffix, 3:1 unless one needs less. None: there is room."""
    if room is None or len(prefix) + len(suffix) <= room:
        return prefix, suffix
    num_suffix = min(len(suffix), max(room // 4, room - len(prefix)))
    num_prefix = min(len(prefix), room - num_suffix)
    return prefix[len(prefix) - num_prefix :], suffix[:num_suffix]


def _file(tokenizer: Tokenizer, fim: FimTokens, name: str, text: str) -> list[int]:
    end = "" if text.endswith("\n") else "\n"
    marker = [] if fim.file is None else [fim.file]
    return [*marker, *_encoded(tokenizer, f"{name}\n{text}{end}")]


def _before(tokenizer: Tokenizer, fim: FimTokens, files: list[list[int]], room: int | None) -> tuple[list[int], int]:
    """Return the tokens of the last files that have room, and the number of tokens of the others."""
    if not files:
        return [], 0
    first = [] if fim.repository is None else [fim.repository, *_encoded(tokenizer, f"{REPOSITORY_NAME}\n")]
    last = [] if fim.file is None else [fim.file, *_encoded(tokenizer, f"{CURRENT_NAME}\n")]
    num_kept, num_tokens = 0, len(first) + len(last)
    for file in reversed(files):
        if room is not None and num_tokens + len(file) > room:
            break
        num_tokens += len(file)
        num_kept += 1
    left_out, kept = files[: len(files) - num_kept], files[len(files) - num_kept :]
    num_left_out = sum(map(len, left_out))
    if not kept:
        return [], num_left_out
    return [*first, *(token_id for file in kept for token_id in file), *last], num_left_out
