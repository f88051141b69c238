"""From what a client wrote to tokens: chat template, tokenizer and all checks, in threads beside the event loop.

It reads the tokenizer from the model's files a second time, so that nothing of this happens in the engine's process.
Knows no HTTP and no tensors. Next to read: `generation.py`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from quire.config import EngineConfig
from quire.engine.input_processor import InputProcessor
from quire.engine.tokenizer_source import load_tokenizer
from quire.errors import InvalidParameterError, RequestError
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

    def warm_up(self) -> None:
        """Do everything once that a first request would have to wait for: imports, the template, the tokenizer."""
        with suppress(RequestError):  # a model without a chat template
            self.chat_prompt([{"role": "user", "content": "Hello!"}])
        self.prompt("Hello!")

    async def run(self, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call something that takes its time, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        max_len: int | None = None,
    ) -> "PromptTokens":
        """The prompt of a conversation. Raises: ChatTemplateError, PromptError, ContextLengthError.

        The template writes the special tokens itself, so that `add_special_tokens` is rarely right.
        """
        chat = self.tokenizer.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=self.chat_template,
            **(variables or {}),
        )
        if max_len is None:
            self.input_processor.check_text_length(chat.text)
        return _kept(chat.text, self.tokenizer.encode_chat(chat, add_special_tokens=add_special_tokens), max_len)

    def prompt(
        self, prompt: str | list[int], *, add_special_tokens: bool = True, max_len: int | None = None
    ) -> "PromptTokens":
        """Token ids of a text, or as they came. Of more than `max_len` only the last are kept.

        Raises: PromptError, ContextLengthError for a text that cannot fit however it is cut into tokens.
        """
        if isinstance(prompt, str):
            if max_len is None:
                self.input_processor.check_text_length(prompt)
            text, token_ids = prompt, self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            text, token_ids = None, prompt
        return _kept(text, token_ids, max_len)

    @property
    def template(self) -> str | None:
        """The source of the chat template: the operator's, else the model's."""
        return self.chat_template or self.tokenizer.chat_template

    def max_prompt_len(self, truncate_prompt_tokens: int | None, max_tokens: int | None) -> int | None:
        """How many tokens of a prompt are kept; None: all. -1 keeps what leaves room for `max_tokens`.

        Raises: InvalidParameterError.
        """
        if truncate_prompt_tokens == 0:
            raise InvalidParameterError("truncate_prompt_tokens", 0, "-1 or at least 1")
        if truncate_prompt_tokens == -1:
            return max(1, self.config.scheduler.max_model_len - (max_tokens or 1))
        return truncate_prompt_tokens

    def sampling_params(self, chosen: Mapping[str, Any]) -> SamplingParams:
        """The client's values over the model's recommendations. Raises: InvalidParameterError."""
        return SamplingParams(**{**self.config.model.generation_defaults, "max_tokens": None, **chosen})

    def prepare(
        self, request_id: str, prompt: "PromptTokens", params: SamplingParams | PoolingParams, **identity: Any
    ) -> Request:
        """Check all that can be wrong with a request. Raises: RequestError."""
        return self.input_processor.prepare(request_id, prompt.token_ids, params, **identity).request


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt ready to be computed. `text` is None where the client sent token ids."""

    text: str | None
    token_ids: list[int]
    num_truncated: int = 0


def _kept(text: str | None, token_ids: list[int], max_len: int | None) -> PromptTokens:
    num_truncated = 0 if max_len is None else max(0, len(token_ids) - max_len)
    return PromptTokens(text, token_ids[num_truncated:], num_truncated)
