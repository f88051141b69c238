"""Adds the faults of `QUIRE_FAULTS` to an engine process; Python imports this file at start from PYTHONPATH."""

import os
import sys

if os.environ.get("QUIRE_FAULTS") and "quire.engine.process.child" in sys.orig_argv:
    from injection import FaultyExecutor, FaultyTokenizer, parse_faults

    from quire.engine import build

    faults, make_engine = parse_faults(os.environ["QUIRE_FAULTS"]), build.LLMEngine
    build.LLMEngine = lambda config, executor, tokenizer, **options: make_engine(
        config, FaultyExecutor(executor, faults), FaultyTokenizer(tokenizer, faults), **options
    )
