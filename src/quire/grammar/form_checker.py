"""`FormChecker`: whether forms can be enforced, for a process that has no use for matchers.

What it makes of a form, `GrammarCompiler.compile` takes in the process that generates: neither the check nor the
process that it runs in is needed twice. Next to read: `compiler.py`.
"""

import threading
from contextlib import suppress

from quire.errors import QuireError
from quire.grammar.check_process import CheckProcess, shared_check_process
from quire.grammar.compiler import check_form
from quire.grammar.form_cache import FormCache
from quire.structured_outputs import StructuredOutputsParams

CACHE_BYTES = 8 << 20


class FormChecker:
    """Checks forms, and remembers those that passed. Safe to use from several threads."""

    def __init__(self, check_process: CheckProcess | None = None, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._check_process = check_process
        self._passed: FormCache[str] = FormCache(cache_bytes)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Size of what is remembered, at most `cache_bytes`."""
        return self._passed.num_bytes

    def warm_up(self) -> None:
        """Start the process that checks. One that does not start is the first form's error."""
        with suppress(QuireError):
            self.check(StructuredOutputsParams(json_object=True))

    def close(self) -> None:
        """End the process; another `check` starts a new one."""
        (self._check_process or shared_check_process()).close()

    def check(self, spec: StructuredOutputsParams) -> str:
        """The library's grammar for a form. Raises: as `GrammarCompiler.compile`."""
        found = self.passed(spec)
        return self._remember(spec, check_form(spec, self._check_process)) if found is None else found

    def passed(self, spec: StructuredOutputsParams) -> str | None:
        """The grammar of a form that was checked before; None if it was not, or long ago."""
        with self._lock:
            return self._passed.get(spec)

    def _remember(self, spec: StructuredOutputsParams, grammar: str) -> str:
        with self._lock:
            self._passed.put(spec, grammar, len(spec.text.encode()) + len(grammar.encode()))
        return grammar
