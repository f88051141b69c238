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

    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm import LLM
    from quire.engine.llm_engine import LLMEngine
    from quire.errors import QuireError
    from quire.models.registry import ModelRegistry
    from quire.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
    from quire.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
    from quire.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_LAZY = {
    "LLM": "quire.engine.llm",
    "AsyncLLM": "quire.engine.async_llm",
    "LLMEngine": "quire.engine.llm_engine",
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

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LLMEngine",
    "ModelRegistry",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> "Any":
    if name not in _LAZY:
        raise AttributeError(f"module 'quire' has no attribute '{name}'")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
