"""`measure_importance`: the mean squared input of each column of a model's matrices, over a text.

The model runs op by op, in windows of the text, and hooks see the inputs of its linear layers. Embeddings, the head and
the matrices of experts have no entry. Next to read: `gguf/quantize.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from quire import nn
from quire.config import EngineOptions
from quire.engine.build import resolve_config
from quire.engine.llm_engine import LLMEngine
from quire.engine.tokenizer_source import load_tokenizer
from quire.errors import ConfigError, UnsupportedModelError
from quire.layers.linear import Linear
from quire.lazy_torch import Tensor, require_torch
from quire.models.registry import ModelRegistry
from quire.parallel.executor import InProcessExecutor
from quire.runtime.worker import Worker
from quire.sampling_params import SamplingParams
from quire.weight_map import weight_map
from quire.weights.checkpoint import open_checkpoint
from quire.weights.model_files import Progress, ignore_progress
from quire.weights.sources import ModelFiles
from quire_workshop.gguf.quantize import SourceTensor

WINDOW_LEN = 512
"""Tokens of a window, where the model's context is longer."""


def measure_importance(
    files: ModelFiles, tensors: Iterable[SourceTensor], text: str, *, progress: Progress = ignore_progress
) -> tuple[dict[str, np.ndarray], int, int]:
    """Return the means by the tensors' GGUF names, the number of tokens, and that of a window; whole windows count.

    Shapes: per tensor fp32 `[columns]`.
    Raises: ConfigError for a text shorter than a window; UnsupportedModelError for a model of which no layer is seen.
    """
    require_torch("an importance matrix")
    checkpoint = open_checkpoint(files)
    token_ids = load_tokenizer(checkpoint).encode(text)
    context_len = ModelRegistry.make_model_config(checkpoint.hf_config, checkpoint.generation_config).context_len
    window_len = min(WINDOW_LEN, context_len - 1)
    windows = [token_ids[at : at + window_len] for at in range(0, len(token_ids) - window_len + 1, window_len)]
    if not windows:
        raise ConfigError(f"the text has {len(token_ids)} tokens; an importance matrix needs {window_len} or more")
    options = EngineOptions(
        model=files.name,
        device="cpu",
        enforce_eager=True,
        max_model_len=window_len + 1,
        max_num_seqs=1,
        max_num_batched_tokens=window_len + 1,
        enable_prefix_caching=False,
    )
    worker = Worker(resolve_config(options, checkpoint), checkpoint)
    model = worker.forward.model  # type: ignore[attr-defined]
    engine = LLMEngine(worker.config, InProcessExecutor(worker), None)
    sums: dict[str, Tensor] = {}

    def summing(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
            squares = inputs[0].detach().float().square().sum(0).double()
            sums[name] = sums[name] + squares if name in sums else squares

        return hook

    for name, module in nn.named_modules(model):
        if isinstance(module, Linear):
            module.register_forward_pre_hook(summing(name))
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    for index, window in enumerate(windows):
        engine.add_request(str(index), {"prompt_token_ids": window}, params)
        while engine.has_unfinished_requests():
            engine.step()
        progress("measuring activations", len(text) * (index + 1) // len(windows), len(text))
    engine.shutdown()
    num_tokens = len(windows) * window_len
    found, needed = {}, weight_map(model, checkpoint.tensors).sources
    parameters = {source.name: name for name, sources in needed.items() for source in sources}
    for tensor in tensors:
        if tensor.hf_name in parameters and tensor.name != "output.weight":  # the head sees a window's last token alone
            total = sums.get(parameters[tensor.hf_name].removesuffix(".weight"))
            if total is not None and total.shape == tensor.shape[-1:]:
                found[tensor.name] = (total / num_tokens).float().numpy()
    if not found:
        raise UnsupportedModelError(f"{files.name}: no linear layer was seen; quantise without an importance matrix")
    return found, num_tokens, window_len
