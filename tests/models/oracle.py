"""`Pair`: a tiny random model of Transformers, and the same weights in our model, planned and op by op."""

import copy
from typing import Any

import torch
import transformers

from quire.config import EngineConfig
from quire.runtime.plan.lower import Program
from quire.runtime.plan.packed_weights import PackedWeights
from tests.models.harness import Runner, build_model
from tests.runtime.plan.harness import PlanRunner, make_checkpoint, make_config

STORED_BUFFERS = ("e_score_correction_bias", "layer_scalar")
"""Buffers that a checkpoint has."""


def make_oracle(model_type: str, fields: dict[str, Any], **options: Any) -> Any:
    """Transformers' model of these fields, with its vision tower if it has one."""
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    sees_images = model_type in ("gemma4", "mistral3", "qwen3_5", "qwen3_5_moe")
    auto = transformers.AutoModelForImageTextToText if sees_images else transformers.AutoModelForCausalLM
    return auto.from_config(config, **options)


def num_language_parameters(oracle: Any) -> int:
    """Parameters that text depends on."""
    vision = [
        part
        for name, part in oracle.named_modules()
        if name in ("model.vision_tower", "model.visual", "model.multi_modal_projector", "model.embed_vision")
    ]
    stored = [values for name, values in oracle.named_buffers() if name.endswith(STORED_BUFFERS)]
    added = sum(values.numel() for values in stored)
    return added + oracle.num_parameters() - sum(values.numel() for part in vision for values in part.parameters())


class Pair:
    """Transformers' model and its weights as a checkpoint. Our models of the same options share what was loaded."""

    def __init__(self, model_type: str, fields: dict[str, Any]) -> None:
        self.oracle = make_oracle(
            model_type, fields, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        generator = torch.Generator().manual_seed(11)
        for parameter in self.oracle.parameters():
            scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.data.normal_(float(parameter.ndim == 1), scale, generator=generator)
        for name, buffer in self.oracle.named_buffers():
            if name.endswith(STORED_BUFFERS):
                buffer.normal_(float(buffer.numel() == 1), 0.3, generator=generator)
        self.hf_config = {"model_type": model_type, "architectures": [type(self.oracle).__name__], **fields}
        self.checkpoint = make_checkpoint(self.hf_config, self.oracle.state_dict())
        self._plans: dict[frozenset[tuple[str, Any]], tuple[EngineConfig, tuple[Program, PackedWeights]]] = {}
        self._expected: dict[tuple[int, ...], torch.Tensor] = {}
        self._models: dict[tuple[torch.dtype, int | None], Any] = {}

    def runner(self, *, scatter: int = 0, **options: Any) -> PlanRunner:
        key = frozenset(options.items())
        config, loaded = self._plans.get(key) or (make_config(self.hf_config, **options), None)
        runner = PlanRunner(config, self.checkpoint, scatter=scatter, loaded=loaded)
        self._plans[key] = config, runner.loaded
        return runner

    def expected(self, token_ids: list[int]) -> torch.Tensor:
        """Return Transformers' logits, computed once: of the weights that the oracle had then."""
        key = tuple(token_ids)
        if key not in self._expected:
            with torch.inference_mode():
                self._expected[key] = self.oracle(torch.tensor([token_ids]), use_cache=False).logits[0]
        return self._expected[key]

    def error(self, token_ids: list[int]) -> float:
        """Largest error of Transformers' own logits in fp32, relative to the largest logit."""
        with torch.inference_mode():
            exact = copy.deepcopy(self.oracle).double()(torch.tensor([token_ids]), use_cache=False).logits[0]
        return float((self.expected(token_ids) - exact).abs().max() / exact.abs().max())

    def eager(self, dtype: torch.dtype = torch.float32, max_model_len: int | None = None, **options: Any) -> Runner:
        """Our own model, op by op."""
        key = (dtype, max_model_len)
        if key not in self._models:
            self._models[key] = build_model(self.hf_config, self.oracle.state_dict(), max_model_len, dtype)
        return Runner(self._models[key], num_blocks=300, **options)

    def runners(self, **options: Any) -> list[PlanRunner | Runner]:
        eager = {"max_model_len": options.get("max_model_len"), "block_size": options.get("block_size", 4)}
        return [self.runner(**options), self.eager(**eager)]
