"""`EngineHandle`: what `LLM` and `AsyncLLM` share: how they are made, their tokenizer, and their end.

Next to read: `llm.py`, `async_llm.py`.
"""

from types import TracebackType
from typing import Any, Self

from quire.engine.llm_engine import LLMEngine
from quire.sampling_params import SamplingParams
from quire.text.tokenizer import Tokenizer


class EngineHandle:
    """Owner of one engine. `llm_engine`: the engine; of an `AsyncLLM` only `config` and `events` may be read."""

    def __init__(self, model: str = "smollm2", **kwargs: Any) -> None:
        """Loads the model; takes seconds. Raises: ConfigError, ModelError, CapacityError."""
        self._attach(LLMEngine.from_options(model, **kwargs))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """Wrap an existing engine, which the caller must not step any more."""
        handle = cls.__new__(cls)
        handle._attach(engine)
        return handle

    def _attach(self, engine: LLMEngine) -> None:
        self.llm_engine = engine

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of the model's generation_config.json."""
        return self.llm_engine.input_processor.default_sampling_params

    def shutdown(self) -> None:
        """Free the model's memory. Also done at the end of a `with` block."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
