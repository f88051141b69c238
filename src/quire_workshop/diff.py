"""`compare_with_hf`: a model's tensors beside those of Hugging Face Transformers, module by module, for one prompt.

Both compute in fp32. The model runs op by op, so that each module has an output; then its plan runs, which has logits
only. Modules are matched by their names in the checkpoint. Next to read: `cli/diff.py`, `quire/models/registry.py`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire import nn
from quire.config import EngineOptions
from quire.engine.build import resolve_config
from quire.engine.llm_engine import LLMEngine
from quire.errors import UnsupportedModelError
from quire.insight.reference import load_reference
from quire.lazy_torch import Tensor, is_tensor, torch
from quire.parallel.executor import InProcessExecutor
from quire.runtime.hardware import each_instruction_set
from quire.runtime.worker import Worker
from quire.sampling_params import SamplingParams
from quire.weight_map import Rows, View, WeightMap, weight_map
from quire.weights.checkpoint import Checkpoint

LOGITS, PLAN_LOGITS = "logits", "logits of the plan"
Outputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class DiffRow:
    """A tensor of both sides.

    Fields:
        name: the module's, without the checkpoint's prefix. source: class and file that made it here.
        max_error: largest |ours - reference|; share: divided by the largest |reference|.
        cosine: of both as vectors. token, channel: place of the largest error; ours, reference: the values there.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    max_error: float
    share: float
    cosine: float
    token: int
    channel: int
    ours: float
    reference: float


def compare_with_hf(
    options: EngineOptions, checkpoint: Checkpoint, path: Path, token_ids: Sequence[int]
) -> list[DiffRow]:
    """Return a row per module that both sides have, in the order of computation, then the logits.

    `path`: the model's directory or GGUF file. Raises: ConfigError without Transformers; UnsupportedModelError if it
    cannot load the model, or no module has the same name on both sides.
    """
    reference, parameter_names = _reference(path, token_ids)
    ours, sources, model = _ours(replace(options, enforce_eager=True), checkpoint, token_ids)
    expected = _as_ours(reference, weight_map(model, parameter_names))
    rows = []
    for name, tensor in ours.items():
        wanted = expected.get(name)
        if wanted is not None and wanted.numel() == tensor.numel():
            rows.append(_row(name, sources.get(name, ""), tensor, wanted.reshape(tensor.shape)))
    if not any(row.name not in (LOGITS, PLAN_LOGITS) for row in rows):
        raise UnsupportedModelError("no module has the same name here and in Transformers: only logits can be compared")
    return rows + _plan_rows(options, checkpoint, token_ids, expected[LOGITS])


def bisect_kernels(options: EngineOptions, checkpoint: Checkpoint, token_ids: Sequence[int]) -> list[DiffRow]:
    """Compute the plan with each instruction set's kernels. Returns: the logits of each beside those op by op."""
    expected = _ours(replace(options, enforce_eager=True), checkpoint, token_ids)[0][LOGITS]
    with closing(each_instruction_set()) as sets:
        return [replace(row, name=isa) for isa in sets for row in _plan_rows(options, checkpoint, token_ids, expected)]


def first_departure(rows: Sequence[DiffRow], tolerance: float) -> DiffRow | None:
    """Return the first tensor whose largest error is above `tolerance` times the largest value of the reference."""
    return next((row for row in rows if not row.share <= tolerance), None)


# --- Both sides ---------------------------------------------------------------------------------


def _plan_rows(
    options: EngineOptions, checkpoint: Checkpoint, token_ids: Sequence[int], reference: Tensor
) -> list[DiffRow]:
    """Return the row of the plan's logits; nothing if the model has no plan. Shapes: reference [T, V]."""
    ours, _, _ = _ours(options, checkpoint, token_ids)
    return [_row(PLAN_LOGITS, "runtime/plan", ours[PLAN_LOGITS], reference)] if PLAN_LOGITS in ours else []


def _ours(
    options: EngineOptions, checkpoint: Checkpoint, token_ids: Sequence[int]
) -> tuple[Outputs, dict[str, str], Any]:
    """Compute the prompt in one step. Returns: outputs by module, class and file of each module, and the model."""
    options = replace(
        options,
        device="cpu",
        dtype="float32",
        max_model_len=len(token_ids) + 1,
        max_num_seqs=1,
        max_num_batched_tokens=len(token_ids) + 1,
        enable_prefix_caching=False,
    )
    worker = Worker(resolve_config(options, checkpoint), checkpoint)
    engine = LLMEngine(worker.config, InProcessExecutor(worker), None)
    model = getattr(worker.forward, "model", None)
    engine.add_request("diff", {"prompt_token_ids": list(token_ids)}, SamplingParams(temperature=0, max_tokens=1))
    with _recorded(model) as found:
        engine.step()
    found[LOGITS] = torch.tensor(worker.forward.logits(np.arange(len(token_ids), dtype=np.int32)))
    if model is None:
        found[PLAN_LOGITS] = found[LOGITS]
    sources = {name: _source(module) for name, module in _named(model)}
    engine.shutdown()
    return found, sources, model


def _reference(path: Path, token_ids: Sequence[int]) -> tuple[Outputs, list[str]]:
    """Compute the prompt with Transformers. Returns: outputs by module, and the names of all parameters."""
    model = load_reference(path)
    with _recorded(model) as found, torch.inference_mode():
        found[LOGITS] = model(torch.tensor([list(token_ids)])).logits[0]
    return found, [name for name, _ in model.named_parameters()]


@contextmanager
def _recorded(model: Any) -> Iterator[Outputs]:
    """Keep the first tensor that each module returns, by the module's name, in the order in which they end."""
    found: Outputs = {}

    def keep(name: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, arguments: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if is_tensor(value) and name:
                found[name] = value.detach().float().clone()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in _named(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


# --- Names and numbers --------------------------------------------------------------------------


def _as_ours(outputs: Outputs, needed: WeightMap) -> Outputs:
    """Return the reference's outputs by our modules' names; of a merged projection those of its parts, side by side.

    A module is that of the same parameters; the modules around both belong together too.
    """
    found: Outputs = {LOGITS: outputs[LOGITS]}
    for parameter, sources in needed.sources.items():
        name, modules = parameter.rpartition(".")[0], {each.name.rpartition(".")[0]: each.views for each in sources}
        if name not in found and modules.keys() <= outputs.keys():
            parts = [_with_rows(outputs[each].flatten(0, -2), views) for each, views in modules.items()]
            found[name] = torch.cat(parts, -1)
        around = next(iter(modules))
        while name := name.rpartition(".")[0]:
            around = around.rpartition(".")[0]
            if around in outputs:
                found.setdefault(name, outputs[around])
    return found


def _with_rows(output: Tensor, views: Sequence[View]) -> Tensor:
    """Return a layer's output in the order that views give the rows of its weight. Shapes: [T, C] -> the same."""
    for view in views:
        if isinstance(view, Rows) and len(view.order) == output.shape[-1]:
            output = output[:, view.order]
    return output


def _row(name: str, source: str, ours: Tensor, reference: Tensor) -> DiffRow:
    ours, reference = ours.flatten(0, -2), reference.flatten(0, -2)  # [T, C]
    error = (ours - reference).abs()
    error = torch.where(error.isnan(), torch.inf, error)
    worst = int(error.argmax())
    token, channel = divmod(worst, ours.shape[-1])
    largest = float(error.flatten()[worst])
    cosine = float(torch.cosine_similarity(ours.flatten().double(), reference.flatten().double(), 0))
    values = float(ours[token, channel]), float(reference[token, channel])
    share = largest / max(float(reference.abs().max()), 1e-30)
    return DiffRow(name, source, tuple(ours.shape), largest, share, cosine, token, channel, *values)


def _named(model: Any) -> list[tuple[str, Any]]:
    """Return the modules of a model and their names; none of a plan."""
    return [] if model is None else list(nn.named_modules(model))


def _source(module: Any) -> str:
    file = inspect.getsourcefile(type(module)) or ""
    return f"{type(module).__name__}, {'/'.join(Path(file).parts[-2:])}"
