"""From `StructuredOutputsParams` to matchers of tokens: `GrammarCompiler`, and `GrammarChecker` for the server.

A new grammar is compiled in a separate process first (`check_process.py`). The server's process checks a grammar with
`GrammarChecker` and sends the result to the engine's process, where `GrammarCompiler` has the vocabulary and need not
check again. Results are kept within a bound of bytes. Each text has a matcher of its own, so that its memory belongs to
its request: llguidance's copies of a matcher share their states, and one request could use up another's limit.
Next to read: `matcher.py`.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakValueDictionary

from quire.errors import InvalidParameterError, QuireError
from quire.grammar.check_process import (
    CheckProcess,
    CheckProcesses,
    RefusedGrammar,
    shared_check_processes,
    short_reason,
)
from quire.grammar.limits import parser_limits
from quire.grammar.matcher import TokenMatcher, Vocabulary
from quire.grammar.reasoning import ReasoningMatcher
from quire.linux import yield_to_others
from quire.structured_outputs import ReasoningSpan, StructuredOutputsParams

if TYPE_CHECKING:
    import llguidance

COMPILER_CACHE_BYTES = 64 << 20
CHECKER_CACHE_BYTES = 8 << 20
MATCHER_BYTES = 160 << 10
"""Size of a matcher that no text has used. 70 to 145 KB measured for schemas of 1 to 20 properties."""
MATCHER_BYTES_PER_BYTE = 32
"""Size added by each byte of the grammar: 284 KB measured for 5.7 KB."""
WARM_UP_GRAMMAR = "start: /[a-z]{1,3}/"
_T = TypeVar("_T")


def check_grammar(spec: StructuredOutputsParams, process: CheckProcess | CheckProcesses | None = None) -> str:
    """Return llguidance's grammar for `spec`. Raises: as `GrammarCompiler.compile`."""
    answer = (process or shared_check_processes()).check(spec)
    if isinstance(answer, RefusedGrammar):
        raise _refusal(spec, answer.reason)
    return answer


def _refusal(spec: StructuredOutputsParams, reason: str) -> InvalidParameterError:
    limit = f"a constraint that can be enforced ({reason})"
    value = None if spec.kind is None else getattr(spec, spec.kind)
    return InvalidParameterError(f"structured_outputs.{spec.kind}", value, limit)


class _Cache(Generic[_T]):
    """Drops the least recently used grammars first. Not thread-safe: its owner holds a lock."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[StructuredOutputsParams, tuple[_T, int]] = OrderedDict()

    def get(self, spec: StructuredOutputsParams) -> _T | None:
        if spec not in self._kept:
            return None
        self._kept.move_to_end(spec)
        return self._kept[spec][0]

    def put(self, spec: StructuredOutputsParams, value: _T, size_bytes: int) -> None:
        if spec in self._kept:
            return
        self._kept[spec] = (value, size_bytes)
        self.num_bytes += size_bytes
        while self.num_bytes > self._max_bytes:
            _, (_, dropped_bytes) = self._kept.popitem(last=False)
            self.num_bytes -= dropped_bytes


class GrammarChecker:
    """Checks grammars without a vocabulary, and keeps the results. Thread-safe."""

    def __init__(self, check_process: CheckProcess | None = None, *, cache_bytes: int = CHECKER_CACHE_BYTES) -> None:
        self._check_process = check_process
        self._passed: _Cache[str] = _Cache(cache_bytes)
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Start the process that checks. If it does not start, the first request gets the error."""
        with suppress(QuireError):
            self.check(StructuredOutputsParams(json_object=True))

    def close(self) -> None:
        """End the process; another `check` starts a new one."""
        (self._check_process or shared_check_processes()).close()

    def found(self, spec: StructuredOutputsParams) -> str | None:
        """Return the result of `check` if it is known."""
        constraint = spec.constraint
        if constraint is None:
            return ""
        with self._lock:
            return self._passed.get(constraint)

    def check(self, spec: StructuredOutputsParams) -> str:
        """Return llguidance's grammar for `spec`; empty if there is only reasoning.

        Raises: as `GrammarCompiler.compile`.
        """
        if (known := self.found(spec)) is not None:
            return known
        constraint = spec.constraint
        assert constraint is not None, "reasoning alone is always known"
        checked = check_grammar(constraint, self._check_process)
        with self._lock:
            self._passed.put(constraint, checked, len(constraint.text.encode()) + len(checked.encode()))
        return checked


class CompiledGrammar:
    """A grammar for one vocabulary. Thread-safe: `start` makes a matcher for each text."""

    def __init__(self, grammar: str, vocabulary: Vocabulary) -> None:
        self.size_bytes = MATCHER_BYTES + (MATCHER_BYTES_PER_BYTE + 2) * len(grammar.encode())
        """Estimated size of grammar, key and one prepared matcher."""
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._prepared: llguidance.LLMatcher | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make the matcher that the next `start` takes: a millisecond, up to a second for large grammars.

        Raises: ValueError with the library's reason.
        """
        with self._lock:
            if self._prepared is None:
                self._prepared = self._make()

    def start(self) -> TokenMatcher:
        """Return a matcher at the beginning of a text. Raises: ValueError with the library's reason."""
        with self._lock:
            matcher, self._prepared = self._prepared, None
        vocabulary = self._vocabulary
        return TokenMatcher(matcher or self._make(), len(vocabulary.tokens), vocabulary.eos_token_ids)

    def _make(self) -> "llguidance.LLMatcher":
        import llguidance

        tokenizer = self._vocabulary.library_tokenizer
        matcher = llguidance.LLMatcher(tokenizer, self._grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher


class CompiledReasoning:
    """A text that begins with reasoning, for one vocabulary. Thread-safe: `start` makes a matcher for each text."""

    def __init__(self, span: ReasoningSpan, vocabulary: Vocabulary, grammar: CompiledGrammar | None) -> None:
        """`grammar`: of the answer; None: it is free. Raises: InvalidParameterError."""
        closing = span.closing_text.encode()
        spelled = b"".join([vocabulary.tokens[token_id] for token_id in vocabulary.spell(closing)])
        if span.budget is not None and spelled != closing:
            limit = "a text that this model's tokens can spell"
            raise InvalidParameterError("structured_outputs.reasoning.closing", span.closing_text, limit)
        self._span, self._vocabulary, self._grammar = span, vocabulary, grammar

    def start(self) -> ReasoningMatcher:
        """Return a matcher at the beginning of a text. Raises: ValueError with the library's reason."""
        answer = None if self._grammar is None else self._grammar.start()
        return ReasoningMatcher(self._span, self._vocabulary, answer)


class ReservedMatchers:
    """Matchers of a request that waits, made outside of steps. They are freed with it."""

    def __init__(self, grammar: CompiledGrammar | CompiledReasoning, count: int) -> None:
        """Raises: ValueError with the library's reason."""
        self._grammar = grammar
        self._matchers = [grammar.start() for _ in range(count)]

    def take(self) -> TokenMatcher | ReasoningMatcher:
        """Return one of them."""
        return self._matchers.pop()


class GrammarCompiler:
    """Compiles for one vocabulary. Thread-safe."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        cache_bytes: int = COMPILER_CACHE_BYTES,
        check_process: CheckProcess | None = None,
    ) -> None:
        """`make_vocabulary` is called with the first grammar; it may raise InvalidParameterError."""
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._check_process = check_process
        self._kept: _Cache[CompiledGrammar] = _Cache(cache_bytes)
        self._in_use: WeakValueDictionary[StructuredOutputsParams, CompiledGrammar] = WeakValueDictionary()
        self._reserved: WeakValueDictionary[str, ReservedMatchers] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._making = ThreadPoolExecutor(1, "quire-matchers", initializer=yield_to_others)
        """The library needs no interpreter while it makes a matcher. What else a request needs is done by its caller:
        a thread without a processor that has the interpreter's lock would stop the steps."""

    @property
    def num_reserved(self) -> int:
        """Return the sequences that wait with a matcher."""
        return len(self._reserved)

    def warm_up(self) -> None:
        """Prepare for the first grammar: 0.2 s, most of it with the interpreter's lock.

        Does nothing for a model that supports no structured outputs.
        """
        with suppress(InvalidParameterError, ValueError):
            CompiledGrammar(WARM_UP_GRAMMAR, self._ready_vocabulary()).start().allowed()

    def compile(self, spec: StructuredOutputsParams, checked: str | None = None) -> CompiledGrammar | CompiledReasoning:
        """Return `spec` for the vocabulary.

        Raises: as `_compile_grammar`; InvalidParameterError if the vocabulary cannot spell the end of reasoning.
        """
        constraint = spec.constraint
        grammar = None if constraint is None else self._compile_grammar(constraint, checked)
        if spec.reasoning is None and grammar is not None:
            return grammar
        assert spec.reasoning is not None
        return CompiledReasoning(spec.reasoning, self._ready_vocabulary(), grammar)

    def reserve(
        self, sequence_ids: Sequence[str], spec: StructuredOutputsParams, checked: str | None = None
    ) -> ReservedMatchers:
        """Compile `spec`, and make a matcher for each sequence of a request, in a thread that yields to the steps.

        A schema of 2,200 properties takes 60 ms. Raises: as `compile`, ValueError.
        """
        reserved = self._making.submit(
            lambda: ReservedMatchers(self.compile(spec, checked), len(sequence_ids))
        ).result()
        with self._lock:
            self._reserved.update(dict.fromkeys(sequence_ids, reserved))
        return reserved

    def start(self, sequence_id: str, spec: StructuredOutputsParams) -> TokenMatcher | ReasoningMatcher:
        """Return a matcher at the beginning of a sequence's text: the reserved one, after a preemption a new one.

        Raises: as `compile`, ValueError.
        """
        with self._lock:
            reserved = self._reserved.pop(sequence_id, None)
        return self.compile(spec).start() if reserved is None else reserved.take()

    def _compile_grammar(self, spec: StructuredOutputsParams, checked: str | None) -> CompiledGrammar:
        """Return the grammar of `spec`. A caller that holds it finds it again, even if it was dropped from the cache.

        checked: the result of `GrammarChecker.check` for `spec`, from another process that is trusted.
        Raises: InvalidParameterError with the reason or the deadline; QueueFullError while other grammars are compiled.
        """
        with self._lock:
            found = self._in_use.get(spec)
            self._kept.get(spec)  # makes it the most recently used
        if found is None:
            vocabulary = self._ready_vocabulary()
            made = CompiledGrammar(check_grammar(spec, self._check_process) if checked is None else checked, vocabulary)
            with self._lock:
                found = self._in_use.setdefault(spec, made)
                self._kept.put(spec, found, found.size_bytes)
        try:
            found.prepare()
        except ValueError as error:
            raise _refusal(spec, short_reason(str(error))) from None
        return found

    def token_bytes(self) -> Sequence[bytes]:
        """Return the text of each token id. Raises: InvalidParameterError if tokens are no runs of bytes."""
        return self._ready_vocabulary().tokens

    def _ready_vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
                _ = self._vocabulary.library_tokenizer
            return self._vocabulary
