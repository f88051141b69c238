"""Joins scheduler, executor and text: `LLMEngine.step`. Start at `llm_engine.py`.

GNU OpenMP's threads spin for about a millisecond while they wait for each other. If another process wants the same
cores, a spinning thread keeps the thread it waits for from running, and a step takes up to 40 times as long. Spinning
for about 20 µs costs nothing on an idle machine (2 cores, 32 streams: 600 tokens/s, 557 with the default).
"""

import os
import sys

SPIN_COUNT = 10_000


def _limit_spinning() -> None:
    """Set GOMP_SPINCOUNT, unless the user chose how threads wait or torch is already imported."""
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if not chosen and "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


_limit_spinning()  # before any module of the engine imports torch
