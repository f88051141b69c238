"""Dialogue, tokenizer and checks of a request. Its routes call it in the threads of `work.py`.

It reads the tokenizer from the model's files a second time, so that the engine's process does none of this work.
Knows no HTTP and no tensors. Next to read: `work.py`, `generation.py`.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from quire.config import EngineConfig
from quire.engine.input_processor import InputProcessor
from quire.engine.tokenizer_source import load_tokenizer
from quire.errors import InvalidParameterError, RequestError
from quire.grammar.compiler import GrammarChecker
from quire.linux import lower_priority
from quire.sampling_params import PoolingParams, SamplingParams
from quire.server.work import FairPool
from quire.text.chat_template import RenderedChat
from quire.text.dialogue import Dialogue, DialogueOptions, PreparedPrompt
from quire.text.tokenizer import LONG_TEXT, Tokenizer
from quire.types import RequestSpec
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source

ENCODER_NICENESS = 19
"""Niceness of the threads for long texts. While two clients sent 1 MiB again and again, two threads of normal priority
raised the inter-token latency of other clients 12 times (2 CPUs)."""
_R = TypeVar("_R")


class FrontEnd:
    """The tokenizer and the limits of one model."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, chat_template: str | None, forms: GrammarChecker | None = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.dialogue = Dialogue(tokenizer.chat_templates, tokenizer, chat_template)
        self.input_processor = InputProcessor(config, tokenizer)
        self.grammars = forms or GrammarChecker()
        self._encoders = ThreadPoolExecutor(
            FairPool.NUM_THREADS, "quire-encode", initializer=partial(lower_priority, ENCODER_NICENESS)
        )

    @classmethod
    def load(cls, config: EngineConfig, chat_template: str | None) -> "FrontEnd":
        """Read the tokenizer and chat template of the loaded model. Raises: ModelError, ConfigError."""
        options, forms = config.options, GrammarChecker()
        # The checker's process starts while the tokenizer is read.
        threading.Thread(target=forms.warm_up, name="quire-forms", daemon=True).start()
        files = resolve_source(options.model, revision=options.revision, progress=None)
        checkpoint = open_checkpoint(files, with_tensors=False)
        tokenizer = load_tokenizer(checkpoint, options.tokenizer, config.model.vocab_size)
        front_end = cls(config, tokenizer, chat_template, forms)
        front_end.dialogue.check_templates()
        try:
            front_end.input_processor.check_grammars()
        except InvalidParameterError:
            forms.close()  # this model supports no structured output
        return front_end

    def warm_up(self) -> None:
        """Do all one-time work before the first request: imports, the template, the tokenizer."""
        with suppress(RequestError):  # a model without a chat template
            self.chat_prompt([{"role": "user", "content": "Hello!"}], None, DialogueOptions())
        self.prompt("Hello!")

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: DialogueOptions,
        *,
        max_len: int | None = None,
        keeps_start: bool = False,
    ) -> "tuple[PreparedPrompt, PromptTokens]":
        """Return a conversation as a prompt, and the tokens of it. `max_len` and `keeps_start` are as in `prompt`.

        Raises: ChatTemplateError, PromptError, ContextLengthError, InvalidParameterError.
        """

        def encode(chat: RenderedChat) -> list[int]:
            text = chat.text
            if max_len is None:
                self.input_processor.check_text_length(text)
            encode_chat, add = self.tokenizer.encode_chat, options.add_special_tokens
            return self.encoded(len(text), lambda: encode_chat(chat, add_special_tokens=add))

        prepared = self.dialogue.prepare(messages, tools, options, encode=encode)
        return prepared, _kept(prepared.text, prepared.token_ids, max_len, keeps_start=keeps_start)

    def prompt(
        self,
        prompt: str | list[int],
        *,
        add_special_tokens: bool = True,
        max_len: int | None = None,
        keeps_start: bool = False,
    ) -> "PromptTokens":
        """Return the prompt of a text or of token ids, truncated to `max_len` tokens: the last, or with `keeps_start`
        the first.

        Raises: PromptError, ContextLengthError for a text with too many characters to fit.
        """
        if isinstance(prompt, str):
            if max_len is None:
                self.input_processor.check_text_length(prompt)
            text, encode = prompt, self.tokenizer.encode
            token_ids = self.encoded(len(text), lambda: encode(text, add_special_tokens=add_special_tokens))
        else:
            text, token_ids = None, prompt
        return _kept(text, token_ids, max_len, keeps_start=keeps_start)

    def encoded(self, num_characters: int, encode: Callable[[], _R]) -> _R:
        """Call `encode`: for a long text in a thread for such texts."""
        return encode() if num_characters <= LONG_TEXT else self._encoders.submit(encode).result()

    def max_prompt_len(self, truncate_prompt_tokens: int | None, max_tokens: int | None) -> int | None:
        """Return the most tokens of a prompt; None: no limit. -1 means as many as leave room for `max_tokens`.

        Raises: InvalidParameterError.
        """
        if truncate_prompt_tokens == 0:
            raise InvalidParameterError("truncate_prompt_tokens", 0, "-1 or at least 1")
        if truncate_prompt_tokens == -1:
            return max(1, self.config.scheduler.max_model_len - (max_tokens or 1))
        return truncate_prompt_tokens

    def sampling_params(self, chosen: Mapping[str, Any]) -> SamplingParams:
        """Return the client's values, and the model's recommendations for others. Raises: InvalidParameterError."""
        return SamplingParams(**{**self.config.model.generation_defaults, "max_tokens": None, **chosen})

    def prepare(
        self, request_id: str, prompt: "PromptTokens", params: SamplingParams | PoolingParams, **identity: Any
    ) -> RequestSpec:
        """Return the request, with all checks done but that of its grammar. Raises: RequestError."""
        _, spec = self.input_processor.make_spec(request_id, prompt.token_ids, params, **identity)
        if spec.sampling is not None and spec.sampling.structured_outputs is not None:
            self.input_processor.check_grammars()
        return spec


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A tokenised prompt. `text` is None if the client sent token ids."""

    text: str | None
    token_ids: list[int]
    num_truncated: int = 0


def _kept(text: str | None, token_ids: list[int], max_len: int | None, *, keeps_start: bool) -> PromptTokens:
    if max_len is None or len(token_ids) <= max_len:
        return PromptTokens(text, token_ids)
    kept = token_ids[:max_len] if keeps_start else token_ids[-max_len:]
    return PromptTokens(text, kept, len(token_ids) - max_len)
