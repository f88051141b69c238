"""OpenVINO GenAI as a side: its continuous-batching pipeline on the GGUF file, stepped in this process.

Options: everything else goes to the plugin as a property (KV_CACHE_PRECISION=f16, INFERENCE_PRECISION_HINT=f32).
Next to read: `protocol.py`.
"""

import itertools
import tempfile
from pathlib import Path
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
        self._path, self._properties = request["model"], properties
        self._whole_model: Any = None
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

    def logits(self, token_ids: list[int]) -> Any:
        """Logits at every position, by the model that GenAI makes of the file. Shapes: numpy float32 [T, V]."""
        if self._whole_model is None:
            self._whole_model = _compiled(self._path, self._properties)
        request = self._whole_model.create_infer_request()
        num_tokens = len(token_ids)
        inputs = {
            "input_ids": np.array([token_ids], np.int64),
            "attention_mask": np.ones((1, num_tokens), np.int64),
            "position_ids": np.arange(num_tokens, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return request.infer(inputs)[0][0]


def _compiled(path: str, properties: dict[str, Any]) -> Any:
    """The model of a GGUF file, compiled without the pipeline, which shows only chosen tokens."""
    with tempfile.TemporaryDirectory(prefix="quire-openvino-") as directory:
        # GenAI writes what it made beside the file.
        file = Path(directory) / Path(path).name
        file.symlink_to(path)
        openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
        core = openvino.Core()
        return core.compile_model(core.read_model(file.parent / "openvino_model.xml"), "CPU", properties)


if __name__ == "__main__":
    serve(OpenVinoSide)
