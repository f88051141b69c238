"""Quire: an LLM inference and serving engine. Public names, imported on first use.

`import quire` costs nothing: torch and numpy are imported when `LLM` is first touched, so that
`quire --help` stays instant. Next to read: `types.py`, then `engine/llm_engine.py`.
"""

import importlib

TYPE_CHECKING = False
"""A constant that type checkers take for true. Importing `typing` takes as long as Python's own start, and Ctrl-C
during that time shows a traceback."""
if TYPE_CHECKING:
    from typing import Any

    from quire.engine.adapters import LoRARequest as LoRARequest
    from quire.engine.async_llm import AsyncLLM as AsyncLLM
    from quire.engine.llm import LLM as LLM
    from quire.engine.llm_engine import LLMEngine as LLMEngine
    from quire.errors import QuireError as QuireError
    from quire.models.registry import ModelRegistry as ModelRegistry
    from quire.outputs import CompletionOutput as CompletionOutput
    from quire.outputs import PoolingRequestOutput as PoolingRequestOutput
    from quire.outputs import RequestOutput as RequestOutput
    from quire.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.sampling_params import PoolingParams as PoolingParams
    from quire.sampling_params import SamplingParams as SamplingParams
    from quire.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"

_LAZY = {
    "LLM": "quire.engine.llm",
    "AsyncLLM": "quire.engine.async_llm",
    "LLMEngine": "quire.engine.llm_engine",
    "LoRARequest": "quire.engine.adapters",
    "ModelRegistry": "quire.models.registry",
    "BeamSearchParams": "quire.sampling_params",
    "PoolingParams": "quire.sampling_params",
    "SamplingParams": "quire.sampling_params",
    "StructuredOutputsParams": "quire.structured_outputs",
    "QuireError": "quire.errors",
    "CompletionOutput": "quire.outputs",
    "PoolingRequestOutput": "quire.outputs",
    "RequestOutput": "quire.outputs",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> "Any":
    if name not in _LAZY:
        raise AttributeError(f"module 'quire' has no attribute '{name}'")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
