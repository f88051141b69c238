"""vLLM on the CPU as a side: its `LLMEngine` stepped in this process, without its engine process and tokenizer.

It cannot read GGUF on a CPU, so it gets the bf16 directory. Extra options are those of `vllm.LLM`.
Next to read: `protocol.py`.
"""

import itertools
import os
from typing import Any

from benchmarks.sides.protocol import Timing, serve, step_all


class VllmSide:
    """The engine."""

    def __init__(self, request: dict[str, Any]) -> None:
        num_threads = request["num_threads"]
        cpus = sorted(os.sched_getaffinity(0))[:num_threads]
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cpus)))
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import vllm

        options = {
            "dtype": "bfloat16",
            "max_num_seqs": request["max_num_seqs"],
            "max_model_len": request["max_model_len"],
            "enable_prefix_caching": False,
            **request["options"],
        }
        llm = vllm.LLM(request["model"], skip_tokenizer_init=True, disable_log_stats=True, **options)
        self._engine = llm.llm_engine
        self._ids = itertools.count()
        self._params = vllm.SamplingParams
        self.version = vllm.__version__
        config = self._engine.vllm_config
        self.settings = {
            "dtype": str(config.model_config.dtype),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "compilation": str(config.compilation_config.mode),
            "threads": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
            "engine_process": False,
            **request["options"],
        }

    def measure(self, prompts: list[list[int]], num_generated: int) -> Timing:
        """Measure one repetition."""
        params = self._params(temperature=0.0, max_tokens=max(num_generated, 1), ignore_eos=True, detokenize=False)
        ids = [f"bench-{next(self._ids)}" for _ in prompts]
        return step_all(self._engine, ids, prompts, params, num_generated)


if __name__ == "__main__":
    serve(VllmSide)
