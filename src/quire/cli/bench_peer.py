"""Hugging Face Transformers as the other side of `quire bench --peer hf`: one static batch, the same weights.

A GGUF file is dequantised by Transformers itself into the engine's compute type; everything else (device,
threads of torch, prompts) is shared with Quire's side, in the same process. Next to read: `bench.py`.
"""

import contextlib
import importlib
import importlib.util
import io
import time
from typing import TYPE_CHECKING, Any

from quire.cli.bench_cases import BenchCase
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.weights.sources import ModelFiles


class TransformersSide:
    """`generate` of Transformers on a static batch, as a `BenchSide`."""

    name = "hf"

    def __init__(self, files: "ModelFiles", *, dtype: str, device: str) -> None:
        """Load the model. Raises: ConfigError when Transformers is not installed."""
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError("--peer hf needs Hugging Face Transformers: pip install transformers accelerate gguf")
        import torch

        transformers: Any = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        arguments: dict[str, Any] = {"dtype": getattr(torch, dtype)}
        if files.kind == "gguf":
            arguments["gguf_file"] = files.path.name
        directory = files.path.parent if files.kind == "gguf" else files.path
        # Transformers draws some progress bars although they are disabled.
        with contextlib.redirect_stderr(io.StringIO()):
            model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), **arguments)
        self._torch = torch
        self._model = model.to(device).eval()
        self._device = device

    def measure(self, case: BenchCase, prompts: list[list[int]]) -> float:
        """Return the tokens per second of one repetition, over the same span as Quire's side."""
        times: list[float] = []
        num_generated = max(case.num_generated, 1)
        token_ids = self._torch.tensor(prompts, device=self._device)
        start = time.perf_counter()
        with self._torch.inference_mode():
            self._model.generate(
                token_ids,
                attention_mask=self._torch.ones_like(token_ids),
                do_sample=False,
                min_new_tokens=num_generated,
                max_new_tokens=num_generated,
                pad_token_id=0,
                stopping_criteria=[_StepClock(times, self._torch, self._device)],
            )
        if case.num_generated == 0:
            return case.num_prompt * len(prompts) / (times[0] - start)
        return len(prompts) * (num_generated - 1) / (times[-1] - times[0])


class _StepClock:
    """A stopping criterion that never stops and notes when each token was ready."""

    def __init__(self, times: list[float], torch: Any, device: str) -> None:
        self._times, self._torch, self._device = times, torch, device

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self._device != "cpu":
            self._torch.cuda.synchronize()
        self._times.append(time.perf_counter())
        return self._torch.zeros(input_ids.shape[0], dtype=self._torch.bool, device=input_ids.device)
