"""A side that needs no engine: run as `python -m tests.benchmarks.fake_side`. Options make it fail in every way."""

import os
import time
from typing import Any

import numpy as np

from benchmarks.sides.protocol import Timing, serve

STEP_S = 0.001


class FakeSide:
    """One token per stream and step: 1, 2, 3, … Logits are the position, except at the token itself."""

    version = "0"

    def __init__(self, request: dict[str, Any]) -> None:
        print("chatter that is no answer")
        self._options = request["options"]
        if self._options.get("fails") == "load":
            raise ValueError("no such model")
        if self._options.get("fails") == "import":
            os._exit(3)
        self.settings = {"threads": request["num_threads"], "variable": os.environ.get("FAKE_SIDE", "")}

    def measure(self, prompts: list[list[int]], num_generated: int) -> Timing:
        if self._options.get("fails") == "measure":
            raise RuntimeError("out of memory")
        timing = Timing(prompts, num_generated)
        if self._options.get("fails") == "early":
            return timing
        for step in range(timing.num_to_generate):
            time.sleep(STEP_S)
            timing.note([step + 1] * len(prompts))
        timing.token_ids = [list(range(timing.num_to_generate)) for _ in prompts]
        return timing

    def logits(self, token_ids: list[int]) -> Any:
        logits = np.zeros((len(token_ids), 8), np.float32)
        logits[np.arange(len(token_ids)), np.array(token_ids) % 8] = self._options.get("sharpness", 1.0)
        return logits

    def limits(self, cases: list[list[int]]) -> dict[str, Any]:
        return {"machine": {"read_bytes_per_s": 1e9}, "tokens_per_s": [1e6 for _ in cases]}


if __name__ == "__main__":
    serve(FakeSide)
