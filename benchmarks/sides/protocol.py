"""Messages between an engine under measurement and the benchmark: one JSON object per line, in turns.

    → {"op": "load", "model": GGUF file or directory, "num_threads": 2, "max_num_seqs": 64, "max_model_len": 2112,
       "options": {…}}
    ← {"seconds": 1.2, "version": "…", "settings": {…}, "has_alternatives": true}
    → {"op": "alternatives", "num_streams": 8, "num_prompt": 128, "num_generated": 64}     optional
    ← {"alternatives": [{"kv": "q8_0"}, …]}                   settings that may be faster in such a case
    → {"op": "measure", "prompts": [[token id, …] per stream], "num_generated": 64, "settings": {"kv": "q8_0"}}
    ← {"seconds": 0.9, "tokens": 504, "token_ids": [[…] per stream]}
    → {"op": "logits", "token_ids": […], "path": "x.npy"}     ← {}      float32 [T, V] is written to the path
    ← {"error": "…"}                                          instead of any answer

A side runs under its own interpreter (`python -m benchmarks.sides.NAME`), so this file needs nothing but the standard
library. Next to read: `quire.py` for the smallest side, `../side_process.py` for the other end.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TextIO

PARENT_DEATH_SIGNAL = 1
"""prctl's PR_SET_PDEATHSIG."""


class Side(Protocol):
    """An engine. Loading happens in its constructor, which is called with the "load" message."""

    version: str
    settings: dict[str, Any]
    """Formats, numeric mode and sizes, to judge the speed."""

    def measure(self, prompts: list[list[int]], num_generated: int) -> "Timing":
        """Measure one repetition. `num_generated` 0: prompt processing."""
        ...


class LogitsSide(Side, Protocol):
    """A side that can also show its logits."""

    def logits(self, token_ids: list[int]) -> Any:
        """Logits at every position of a text. Shapes: numpy float32 [T, V]."""
        ...


class Timing:
    """The span that counts, the same for every engine; call `note` after each step, with its clock already read.

    Prompt processing (`num_generated` 0): from the start to the moment the last stream has its first token; all
    prompt tokens count. Generation: from that moment to the first stream's end; tokens made in between count, so
    all streams run all the time, and an engine that decodes some streams before others are prefilled gains nothing.
    When a stream has ended before the last one began there is no such span: `tokens` stays 0.
    """

    def __init__(self, prompts: list[list[int]], num_generated: int) -> None:
        self.num_to_generate = max(num_generated, 1)
        self._is_prefill = num_generated == 0
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_streams = len(prompts)
        self._first_count = 0
        self.seconds = 0.0
        self.tokens = 0
        self.token_ids: list[list[int]] = []
        """Tokens that each stream generated, for comparing sides; optional."""
        self._first_s: float | None = None
        self._is_over = False
        self._start_s = time.perf_counter()

    def note(self, counts: Collection[int]) -> None:
        """After a step: how many tokens each stream has generated so far; streams without any may be left out."""
        now = time.perf_counter()
        if self._is_over or len(counts) < self._num_streams or min(counts) == 0:
            return
        if self._first_s is None:
            self._first_s, self._first_count = now, sum(counts)
            if self._is_prefill:
                self.seconds, self.tokens = now - self._start_s, self._num_prompt_tokens
        elif max(counts) >= self.num_to_generate:
            self.seconds, self.tokens = now - self._first_s, sum(counts) - self._first_count
        self._is_over = max(counts) >= self.num_to_generate


def step_all(engine: Any, ids: Sequence[str], prompts: list[list[int]], params: Any, num_generated: int) -> Timing:
    """Run prompts through an engine with vLLM's `add_request` and `step`."""
    timing = Timing(prompts, num_generated)
    for request_id, prompt in zip(ids, prompts, strict=True):
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
    texts: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        texts |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        timing.note([len(text) for text in texts.values()])
    timing.token_ids = [list(texts[request_id]) for request_id in ids]
    return timing


def serve(make_side: Callable[[dict[str, Any]], Side]) -> None:
    """Answer requests from standard input until it ends."""
    with contextlib.suppress(OSError, AttributeError):
        # When the benchmark is killed its children end too, also stopped ones.
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    answers = _private_stdout()
    side: Side | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "load":
                started = time.perf_counter()
                side = make_side(request)
                seconds = time.perf_counter() - started
                answer = {"seconds": seconds, "version": side.version, "settings": side.settings}
                answer["has_alternatives"] = hasattr(side, "alternatives")
            else:
                assert side is not None, "nothing is loaded"
                answer = _answer(side, request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _answer(side: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "measure":
        chosen = {"settings": request["settings"]} if request.get("settings") else {}
        timing: Timing = side.measure(request["prompts"], request["num_generated"], **chosen)
        return {"seconds": timing.seconds, "tokens": timing.tokens, "token_ids": timing.token_ids}
    if request["op"] == "logits":
        import numpy

        logits = side.logits(request["token_ids"])
        numpy.save(request["path"], numpy.ascontiguousarray(logits, dtype=numpy.float32))
        return {}
    answer: dict[str, Any] = getattr(side, request["op"])(**{k: v for k, v in request.items() if k != "op"})
    return answer


def _private_stdout() -> TextIO:
    """The real standard output; what libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
