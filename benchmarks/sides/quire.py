"""Quire as a side: `LLMEngine` stepped in this process; the options are those of `EngineOptions`.

It can also say how fast this machine could run its model at best. Next to read: `protocol.py`.
"""

import itertools
from typing import Any

from benchmarks.sides.protocol import Timing, serve, step_all

LOGIT_ROWS = 128
"""Rows whose logits are asked for at once; an engine holds memory for few."""


class QuireSide:
    """The engine."""

    def __init__(self, request: dict[str, Any]) -> None:
        from quire import __version__
        from quire.config import EngineOptions
        from quire.engine.llm_engine import LLMEngine

        options = {
            "max_num_seqs": request["max_num_seqs"],
            "max_model_len": request["max_model_len"],
            "enable_prefix_caching": False,
            **request["options"],
        }
        if "speculative" in EngineOptions.__dataclass_fields__:  # an older Quire has no drafts
            options.setdefault("speculative", "off")
        self._engine = LLMEngine.from_options(request["model"], **options)
        self._ids = itertools.count()
        self.version = __version__
        self.settings = self._settings(request["options"])

    def _settings(self, options: dict[str, Any]) -> dict[str, Any]:
        from quire import _native

        config = self._engine.config
        return {
            "dtype": config.dtype,
            "kv_cache_dtype": config.kv_dtype,
            "computes": "native plan" if config.uses_plan else "op by op",
            "weights": "as stored" if config.uses_plan and config.keeps_stored_weights else config.dtype,
            "isa": _native.isa(),
            "num_threads": config.hardware.num_threads,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
            "block_size": config.scheduler.block_size,
            **{key: value for key, value in options.items() if key != "tokenizer"},
        }

    def measure(self, prompts: list[list[int]], num_generated: int) -> Timing:
        """Measure one repetition."""
        from quire.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max(num_generated, 1), ignore_eos=True, detokenize=False)
        ids = [f"bench-{next(self._ids)}" for _ in prompts]
        return step_all(self._engine, ids, prompts, params, num_generated)

    def logits(self, token_ids: list[int]) -> Any:
        """Logits at every position, through the engine's own steps. Shapes: numpy float32 [T, V]."""
        return prompt_logits(self._engine, token_ids)

    def limits(self, cases: list[list[int]]) -> dict[str, Any]:
        """This machine's rates, and the tokens per second they allow per case (num_prompt, num_generated, streams)."""
        from quire_workshop.bench_cases import BenchCase
        from quire_workshop.cli.bench import rooflines

        named = [BenchCase(*case) for case in cases]
        machine, allowed = rooflines(self._engine.config, named)
        limits = [allowed[case.name] for case in named]
        rates = {f"{name}_flops_per_s": rate for name, rate in machine.flops_per_s.items()}
        return {"machine": {"read_bytes_per_s": machine.read_bytes_per_s, **rates}, "tokens_per_s": limits}


def prompt_logits(engine: Any, token_ids: list[int]) -> Any:
    """Run one prompt and keep the logits of all its positions. Shapes: numpy float32 [T, V].

    The only place that looks inside the engine: for the length of one request it puts itself between the runner and
    its forward, and asks for the logits of every row of every step.
    """
    import numpy as np
    import torch

    from quire.sampling_params import SamplingParams

    runner = engine._executor._worker.runner
    forward = runner.forward
    parts: list[torch.Tensor] = []

    class Tap:
        def run(self, layout: Any, *arguments: Any, **options: Any) -> Any:
            result = forward.run(layout, *arguments, **options)
            num_rows = int(layout.counts.sum())
            for first in range(0, num_rows, LOGIT_ROWS):
                rows = np.arange(first, min(first + LOGIT_ROWS, num_rows), dtype=np.int32)
                # The next part may use the same memory.
                parts.append(torch.tensor(forward.logits(rows)))
            return result

        def __getattr__(self, name: str) -> Any:
            return getattr(forward, name)

    runner.forward = Tap()
    try:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        engine.add_request("logits", {"prompt_token_ids": token_ids}, params)
        while engine.has_unfinished_requests():
            engine.step()
    finally:
        runner.forward = forward
    return torch.cat(parts)[: len(token_ids)].numpy()


if __name__ == "__main__":
    serve(QuireSide)
