"""OpenVINO GenAI as a side: its continuous-batching pipeline on the GGUF file, stepped in this process.

Options: everything else goes to the plugin as a property (KV_CACHE_PRECISION=f16, INFERENCE_PRECISION_HINT=f32).
Next to read: `protocol.py`.
"""

import itertools
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.sides.protocol import Timing, serve

CACHE_GIB = 2


class OpenVinoSide:
    """One pipeline."""

    def __init__(self, request: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = request["max_num_seqs"]
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": request["num_threads"], "PERFORMANCE_HINT": "LATENCY"}
        properties |= request["options"]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            request["model"], scheduler_config=scheduler, device="CPU", properties=properties
        )
        self._ids = itertools.count()
        self.version = openvino_genai.__version__
        self.settings = {
            **properties,
            "cpu_optimisations": openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "dynamic_split_fuse": scheduler.dynamic_split_fuse,
        }

    def measure(self, prompts: list[list[int]], num_generated: int) -> Timing:
        """One repetition."""
        timing = Timing(prompts, num_generated)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = timing.num_to_generate
        config.ignore_eos = True
        config.do_sample = False
        pipeline = self._pipeline
        handles = [
            pipeline.add_request(next(self._ids), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for prompt in prompts
        ]
        texts: list[list[int]] = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for handle, text in zip(handles, texts, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        text.extend(output.generated_ids)
            timing.note([len(text) for text in texts])
        timing.token_ids = texts
        return timing


if __name__ == "__main__":
    serve(OpenVinoSide)
