"""`GrammarCompiler`: from `StructuredOutputsParams` to a matcher of tokens.

A grammar that was never seen before is compiled in a process of its own first (`check_process.py`). What passes is
kept, up to 64 MiB. Every text gets a matcher of its own, whose growth is the request's and goes with it: the library's
copies of a matcher share their states, so that one request could use up another's limit.
Next to read: `matcher.py`.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from quire.errors import InvalidParameterError
from quire.grammar.check_process import CheckProcess, Refused, shared_check_process, short_reason
from quire.grammar.form_cache import FormCache
from quire.grammar.limits import parser_limits
from quire.grammar.matcher import TokenMatcher
from quire.grammar.vocabulary import Vocabulary
from quire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import llguidance

CACHE_BYTES = 64 << 20
MATCHER_BYTES = 160 << 10
"""Of a matcher that no text has used. 70 to 145 KB measured for schemas of 1 to 20 properties."""
MATCHER_BYTES_PER_BYTE = 32
"""More for each byte of the grammar's text: 284 KB measured for 5.7 KB."""

WARM_UP_GRAMMAR = "start: /[a-z]{1,3}/"


class CompiledGrammar:
    """A grammar that can be followed. `start` may be called any number of times, by several threads."""

    def __init__(self, grammar: str, vocabulary: Vocabulary, *, is_schema: bool = False) -> None:
        """is_schema: whether it is of a JSON Schema, whose names must have one spelling each."""
        self.size_bytes = MATCHER_BYTES + (MATCHER_BYTES_PER_BYTE + 2) * len(grammar.encode())
        """An estimate of what keeping this takes: grammar and key, and a matcher that waits."""
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._escape_rule = vocabulary.escape_rule if is_schema else None
        self._waiting: llguidance.LLMatcher | None = None
        self._lock = threading.Lock()

    def get_ready(self) -> None:
        """Make the matcher that the next `start` takes: a millisecond, up to a second for large grammars.

        Raises: ValueError with the library's reason.
        """
        with self._lock:
            if self._waiting is None:
                self._waiting = self._make()

    def start(self) -> TokenMatcher:
        """A matcher at the beginning of a text. Raises: ValueError with the library's reason."""
        with self._lock:
            matcher, self._waiting = self._waiting, None
        vocabulary = self._vocabulary
        num_tokens = len(vocabulary.tokens)
        return TokenMatcher(matcher or self._make(), num_tokens, vocabulary.eos_token_ids, self._escape_rule)

    def _make(self) -> "llguidance.LLMatcher":
        import llguidance

        tokenizer = self._vocabulary.library_tokenizer
        matcher = llguidance.LLMatcher(tokenizer, self._grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class GrammarCompiler:
    """Compiles for one vocabulary. Safe to use from several threads."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        cache_bytes: int = CACHE_BYTES,
        check_process: CheckProcess | None = None,
    ) -> None:
        """`make_vocabulary` is called with the first grammar; it may raise InvalidParameterError."""
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._check_process = check_process
        self._kept: FormCache[CompiledGrammar] = FormCache(cache_bytes)
        self._in_use: WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = WeakValueDictionary()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Estimated size of what is kept, at most `cache_bytes`."""
        return self._kept.num_bytes

    def warm_up(self) -> None:
        """Make what the first grammar would wait for: 0.2 s, most of it with the interpreter's lock.

        Nothing happens where texts can follow no grammar.
        """
        with suppress(InvalidParameterError, ValueError):
            CompiledGrammar(WARM_UP_GRAMMAR, self._ready_vocabulary(), is_schema=True).start().allowed()

    def compile(self, spec: StructuredOutputsParams, checked: str | None = None) -> CompiledGrammar:
        """The grammar of a form. Who holds on to it finds it again, whatever else is kept.

        checked: what `FormChecker.check` made of the form, where that was in another process that is trusted.
        Raises: InvalidParameterError with the reason or the deadline; QueueFullError if others' grammars take it all.
        """
        with self._lock:
            found = self._in_use.get(spec)
            self._kept.get(spec)  # what is used is the newest
        if found is None:
            found = self._compile(spec, checked)
        try:
            found.get_ready()
        except ValueError as error:
            raise _refusal(spec, short_reason(str(error))) from None
        return found

    def _compile(self, spec: StructuredOutputsParams, checked: str | None) -> CompiledGrammar:
        vocabulary = self._ready_vocabulary()
        text = check_form(spec, self._check_process) if checked is None else checked
        with self._lock:
            made = CompiledGrammar(text, vocabulary, is_schema=spec.kind == "json")
            grammar = self._in_use.setdefault(spec, made)
            self._kept.put(spec, grammar, grammar.size_bytes)
        return grammar

    def _ready_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
                _ = self._vocabulary.library_tokenizer
            return self._vocabulary


def check_form(spec: StructuredOutputsParams, process: CheckProcess | None = None) -> str:
    """The library's grammar for a form that can be enforced. Raises: as `GrammarCompiler.compile`."""
    answer = (process or shared_check_process()).check(spec)
    if isinstance(answer, Refused):
        raise _refusal(spec, answer.reason)
    return answer


def _refusal(spec: StructuredOutputsParams, reason: str) -> InvalidParameterError:
    limit = f"a form that can be enforced ({reason})"
    return InvalidParameterError(f"structured_outputs.{spec.kind}", getattr(spec, spec.kind), limit)
