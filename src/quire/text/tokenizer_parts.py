"""Result of the two readers of tokenizer files, for Hugging Face directories and for GGUF.

Must not know: `Tokenizer`, which uses it. Next to read: `tokenizer.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import processors

from quire.errors import ModelFileError
from quire.files import is_panic, problem_of
from quire.text.fim_tokens import FimTokens


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer with its special tokens and chat templates.

    Fields:
        backend: a `tokenizers.Tokenizer` or `SentencePieceBackend`, which adds BOS and EOS if the model needs them.
        bos_token_id, eos_token_id: None where the model has none.
        template_variables: names that chat templates may use, such as `bos_token`, with their text.
        chat_templates: Jinja2 sources by name; "default" is used unless a request names another.
        fim: tokens of the fill-in-the-middle format; None if the model has none.
        end_token_ids: tokens that the files name as ends beside EOS.
    """

    backend: Any
    bos_token_id: int | None
    eos_token_id: int | None
    template_variables: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    fim: FimTokens | None = None
    end_token_ids: frozenset[int] = frozenset()


@contextmanager
def library_errors(failure: str) -> Iterator[None]:
    """Raise ModelFileError for an error of the tokenizers library, and for a panic, which is no `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):
            raise
        raise ModelFileError(f"{failure}: {problem_of(error)}; fetch the model again") from None


def add_bos_and_eos(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `backend` put these tokens around each text; None adds nothing. Mutates: `backend`."""
    single, used = ["$A"], []
    # Named by role: the template's own syntax cannot hold every token's text.
    for role, token in (("bos", bos), ("eos", eos)):
        if token is not None:
            single.insert(0 if role == "bos" else len(single), role)
            used.append({"id": role, "ids": [backend.token_to_id(token)], "tokens": [token]})
    backend.post_processor = processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=used)
