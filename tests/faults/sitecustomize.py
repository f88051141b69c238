"""Adds the faults of `QUIRE_FAULTS` to an engine process; Python imports this file at start from PYTHONPATH."""

import os
import sys
from typing import Any

if os.environ.get("QUIRE_FAULTS") and "quire.engine.process.child" in sys.orig_argv:
    from injection import FaultyExecutor, FaultyTokenizer, parse_faults

    from quire.engine import build

    faults, load_parts = parse_faults(os.environ["QUIRE_FAULTS"]), build.load_parts

    def load_faulty(*arguments: Any, **given: Any) -> build.EngineParts:
        parts = load_parts(*arguments, **given)
        return parts._replace(
            executor=FaultyExecutor(parts.executor, faults), tokenizer=FaultyTokenizer(parts.tokenizer, faults)
        )

    build.load_parts = load_faulty
