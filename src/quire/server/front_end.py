"""From what a client wrote to tokens: chat template, tokenizer and all checks, in threads beside the event loop.

It reads the tokenizer from the model's files a second time, so that nothing of this happens in the engine's process.
Knows no HTTP and no tensors. Next to read: `generation.py`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from quire.config import EngineConfig
from quire.engine.input_processor import InputProcessor
from quire.engine.tokenizer_source import load_tokenizer
from quire.sampling_params import PoolingParams, SamplingParams
from quire.text.tokenizer import Tokenizer
from quire.types import Request
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source

_P = ParamSpec("_P")
_R = TypeVar("_R")


class FrontEnd:
    """The tokenizer and the limits of one model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, chat_template: str | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.input_processor = InputProcessor(config, tokenizer)
        self._threads = ThreadPoolExecutor(2, "quire-text")

    @classmethod
    def load(cls, config: EngineConfig, chat_template: str | None) -> "FrontEnd":
        """Read the tokenizer of the model that the engine has loaded. Raises: ModelError, ConfigError."""
        options = config.options
        files = resolve_source(options.model, revision=options.revision, progress=None)
        checkpoint = open_checkpoint(files, with_tensors=False)
        tokenizer = load_tokenizer(checkpoint, options.tokenizer, config.model.vocab_size)
        return cls(config, tokenizer, chat_template)

    async def run(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call something that takes its time, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The prompt of a conversation, as text and token ids. Raises: ChatTemplateError, PromptError."""
        text = self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=self.chat_template,
            **(variables or {}),
        )
        # The template writes the special tokens itself.
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def sampling_params(self, chosen: Mapping[str, Any]) -> SamplingParams:
        """The client's values over the model's recommendations. Raises: InvalidParameterError."""
        return SamplingParams(**{**self.config.model.generation_defaults, "max_tokens": None, **chosen})

    def prepare(self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, **identity: Any) -> Request:
        """Check all that can be wrong with a request. Raises: RequestError."""
        return self.input_processor.prepare(request_id, prompt, params, **identity).request
