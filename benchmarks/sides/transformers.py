"""Hugging Face Transformers as a side: `generate` on one static batch.

Reads the same GGUF file (dequantised by itself) or a directory. Options: dtype (bfloat16, float32), prompt_lookup (the
most tokens of its prompt lookup's drafts, for one stream).
In float32 it is the reference of `../quality.py`. Next to read: `protocol.py`.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.sides.protocol import Timing, serve


class TransformersSide:
    """The model."""

    def __init__(self, request: dict[str, Any]) -> None:
        torch.set_num_threads(request["num_threads"])
        transformers.logging.disable_progress_bar()
        options = {"dtype": "bfloat16", **request["options"]}
        self._assistance: dict[str, Any] = {}
        if "prompt_lookup" in options:
            self._assistance["prompt_lookup_num_tokens"] = options["prompt_lookup"]
        path = Path(request["model"])
        arguments: dict[str, Any] = {"dtype": getattr(torch, options["dtype"])}
        if path.suffix == ".gguf":
            arguments["gguf_file"] = path.name
            path = path.parent
        self._model = transformers.AutoModelForCausalLM.from_pretrained(str(path), **arguments).eval()
        self.version = transformers.__version__
        self.settings = {**options, "num_threads": request["num_threads"], "batch": "static"}

    @torch.inference_mode()
    def measure(self, prompts: list[list[int]], num_generated: int) -> Timing:
        """Measure one repetition."""
        timing = Timing(prompts, num_generated)
        token_ids = torch.tensor(prompts)
        found = self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            min_new_tokens=timing.num_to_generate,
            max_new_tokens=timing.num_to_generate,
            pad_token_id=0,
            stopping_criteria=[_StepClock(timing, len(prompts[0]))],
            **self._assistance,
        )
        timing.token_ids = found[:, len(prompts[0]) :].tolist()
        return timing

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Any:
        """Logits at every position. Shapes: numpy float32 [T, V]."""
        return self._model(torch.tensor([token_ids])).logits[0].float().numpy()


class _StepClock:
    """A stopping criterion that never stops, and notes each step."""

    def __init__(self, timing: Timing, prompt_len: int) -> None:
        self._timing, self._prompt_len = timing, prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self._timing.note([input_ids.shape[1] - self._prompt_len] * len(input_ids))
        return torch.zeros(len(input_ids), dtype=torch.bool)


if __name__ == "__main__":
    serve(TransformersSide)
