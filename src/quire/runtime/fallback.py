"""`load_fallback`: weights into Transformers' own module of an architecture, a check of it, and a warning of its speed.

Transformers renames and merges the stored tensors; Quire's checkpoint has read and decoded them. The check computes a
few tokens whole and again in ragged steps: a module that mixes tokens outside of attention, or that counts positions by
itself, gives other hidden states then, and is refused. Next to read: `models/hf_fallback.py`.
"""

import importlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from quire.config import EngineConfig
from quire.errors import ModelFileError
from quire.layers.forward_batch import ForwardBatch
from quire.models.hf_fallback import RUN, FallbackConfig, TransformersForCausalLM, refused
from quire.models.registry import model_types
from quire.weights.weight_tensor import WeightTensor

logger = logging.getLogger("quire.runtime")
CHECK_LEN = 7
CHECK_BLOCK, NUM_BLOCKS = 4, 2
"""Tokens per block, and blocks per request."""
MAX_DIFFERENCE = {torch.float32: 1e-3}
"""Relative difference of hidden states, by dtype; rounding alone makes less."""
MAX_16_BIT_DIFFERENCE = 0.1


def load_fallback(config: EngineConfig, tensors: Mapping[str, WeightTensor]) -> TransformersForCausalLM:
    """Build, fill and check the model. Raises: UnsupportedModelError; ModelFileError naming tensors that do not fit."""
    transformers = importlib.import_module("transformers")
    model_config = FallbackConfig.from_hf(config.model.hf_config)
    dtype, device = getattr(torch, config.dtype), torch.device(config.device)
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config.hf)]
    with _silent(transformers):
        module, info = kind.from_pretrained(
            None,
            config=model_config.hf,
            dtype=dtype,
            attn_implementation=RUN,
            output_loading_info=True,
            state_dict={name: tensor.to_torch(dtype) for name, tensor in tensors.items()},
        )
    for what in ("missing", "mismatched"):
        if info[f"{what}_keys"]:
            names = ", ".join(sorted(map(str, info[f"{what}_keys"]))[:3])
            raise ModelFileError(f"the checkpoint does not fit Transformers' {kind.__name__}: {what} are {names}")
    if info["unexpected_keys"]:
        names = ", ".join(sorted(info["unexpected_keys"])[:3])
        logger.warning("%d stored tensors are not used, as in Transformers: %s", len(info["unexpected_keys"]), names)
    model = TransformersForCausalLM(model_config, module=module.to(device).eval())
    check_fallback(model)
    return model


def check_fallback(model: TransformersForCausalLM) -> None:
    """Compare hidden states of whole and of ragged steps, and warn of the speed. Raises: UnsupportedModelError."""
    config = model.config
    ids = [(37 * index + 11) % config.vocab_size for index in range(CHECK_LEN)]
    whole, _ = _step(model, _pools(model), [(ids, 0)])
    pools, chunk = _pools(model), CHECK_LEN - 3
    first, _ = _step(model, pools, [(ids[:1], 0), (ids[:chunk], 0)])
    decodes = [_step(model, pools, [([], 0), (ids[at : at + 1], at)]) for at in range(chunk, CHECK_LEN)]
    ragged = torch.cat([first[1:], *(rows for rows, _ in decodes)])
    difference = float((ragged - whole).norm() / whole.norm())
    if not difference <= MAX_DIFFERENCE.get(next(model.parameters()).dtype, MAX_16_BIT_DIFFERENCE):
        reason = f"its hidden states differ by {difference:.1g} when tokens are computed in several steps"
        raise refused(config.hf.model_type, reason)
    name, is_ours = type(model.model).__name__, config.hf.model_type in model_types()
    logger.warning(
        "Transformers' own %s computes this model, op by op, at about %.0f tok/s for one request here; %s",
        name,
        1 / min(seconds for _, seconds in decodes),
        "Quire's own runs as a plan, several times as fast" if is_ours else f"Quire has no implementation of {name}",
    )


def _pools(model: TransformersForCausalLM) -> tuple[torch.Tensor, ...]:
    """KV memory of two requests. Shapes: per layer [N, 2, B, K, D]."""
    parameter, num_blocks = next(model.parameters()), 2 * NUM_BLOCKS
    return tuple(
        torch.zeros(
            num_blocks,
            2,
            CHECK_BLOCK,
            layer.num_kv_heads,
            layer.head_size,
            dtype=parameter.dtype,
            device=parameter.device,
        )
        for layer in model.config.layers
    )


def _step(
    model: TransformersForCausalLM, pools: tuple[torch.Tensor, ...], work: list[tuple[list[int], int]]
) -> tuple[torch.Tensor, float]:
    """Compute one step. `work`: per request its tokens and the position of the first.

    Returns: hidden states [T, E] in fp32, and seconds.
    """
    scheduled = [(request, ids, start) for request, (ids, start) in enumerate(work) if ids]
    device = pools[0].device
    places = [(request, start + offset) for request, ids, start in scheduled for offset in range(len(ids))]
    positions = torch.tensor([position for _, position in places], device=device)
    slots = [request * NUM_BLOCKS * CHECK_BLOCK + position for request, position in places]
    tables = [range(request * NUM_BLOCKS, (request + 1) * NUM_BLOCKS) for request, _, _ in scheduled]
    batch = ForwardBatch(
        token_ids=torch.tensor([token for _, ids, _ in scheduled for token in ids], device=device),
        positions=positions,
        block_tables=(torch.tensor(tables, dtype=torch.int32, device=device),),
        slot_mapping=(torch.tensor(slots, device=device),),
        kv_caches=pools,
        layer_groups=(0,) * len(pools),
        query_lens_list=tuple(len(ids) for _, ids, _ in scheduled),
        seq_lens_list=tuple(start + len(ids) for _, ids, start in scheduled),
    )
    started = time.perf_counter()
    with torch.inference_mode():
        hidden = model(batch.token_ids, batch).float().cpu()
    return hidden, time.perf_counter() - started


@contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Keep Transformers from printing progress and a report of tensors while it loads."""
    logs = transformers.logging
    verbosity, shows_progress = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if shows_progress:
            logs.enable_progress_bar()
