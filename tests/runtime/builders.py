"""Small configs for tests of the runtime."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config import EngineConfig, EngineOptions
from tests.engine import builders


def make_config(
    *, device: str = "cpu", dtype: str = "float32", hf_config: Mapping[str, Any] | None = None, vocab_size: int = 50,
    options: EngineOptions | None = None, **scheduler: Any,
) -> EngineConfig:  # fmt: skip
    """Return an `EngineConfig` that never went through `resolve`; `scheduler`: fields of `SchedulerConfig`."""
    config = builders.make_config(**{"num_blocks": 64, "multi_step_decode": 3, **scheduler})
    model = replace(config.model, architecture="LlamaForCausalLM", hf_config=hf_config or {}, vocab_size=vocab_size)
    return replace(
        config, options=options or EngineOptions(), model=model, hardware=replace(config.hardware, device=device),
        device=device, dtype=dtype, kv_dtype=dtype,
    )  # fmt: skip
